"""What /openapi.json promises, tried with requests made from it."""

import pytest
from hypothesis import HealthCheck, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

checks = pytest.importorskip("schemathesis.specs.openapi.checks")

RANKINGS = ("/rank", "/rerank", "/v1/rerank", "/v2/rerank")

UNTOLD = [checks.positive_data_acceptance]
"""A schema cannot tell all: that drop ratios fit a ranker, that documents have `rank_fields`."""


@pytest.fixture(scope="session")
def described(address):
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_answers_are_as_described_whatever_is_asked(case):
    case.call_and_validate(excluded_checks=UNTOLD)


def test_every_ranking_describes_its_refusals(client):
    paths = client.get("/openapi.json").json()["paths"]
    for path in RANKINGS:
        told = set(paths[path]["post"]["responses"])
        assert {"200", "400", "401", "404", "413", "422", "429", "503"} <= told
