"""What /openapi.json promises, tried with requests made from it."""

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

checks = pytest.importorskip("schemathesis.specs.openapi.checks")

RANKINGS = ("/rank", "/rerank", "/v1/rerank", "/v2/rerank")

UNTOLD = [checks.positive_data_acceptance]
"""A schema cannot tell all: that drop ratios fit a ranker, that documents have `rank_fields`."""


GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE

ASKED = [
    *((path, "POST", mode) for path in RANKINGS for mode in (GOOD, BAD)),
    *((path, "GET", GOOD) for path in ("/info", "/health", "/metrics")),
]


@pytest.fixture(scope="session")
def described(address):
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.mark.parametrize(("path", "method", "mode"), ASKED)
def test_answers_are_as_described_whatever_is_asked(described, path, method, mode):
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=8,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def holds(case):
        case.call_and_validate(excluded_checks=UNTOLD)

    holds()


def test_every_ranking_describes_its_refusals(client):
    paths = client.get("/openapi.json").json()["paths"]
    for path in RANKINGS:
        told = set(paths[path]["post"]["responses"])
        assert {"200", "400", "401", "404", "413", "422", "429", "503"} <= told


def test_page_of_the_interface_has_every_path_and_its_fields_and_no_script(client):
    response = client.get("/docs")
    assert response.status_code == 200
    page, paths = response.text, client.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        assert all(f"<h2>{method.upper()} {path}</h2>" in page for method in operations)
    assert "<td>candidates</td><td>list of string</td><td>required</td>" in page
    assert "<td>budget_ms</td><td>number &gt; 0 and &lt;= 3,600,000 or null</td>" in page
    assert "<script" not in page
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
