"""The metrics of a service on a real Ray Serve, and the dashboard that plots them."""

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES
from served import CANDIDATES, QUESTION

from as2ray.serving import metrics
from as2ray.serving.settings import ServiceConfig
from as2ray.serving.types import CandidateScore, RequestRecord, RerankResult

DASHBOARD = Path(__file__).parents[2] / "serve_configs" / "grafana.json"
QUERIES = [
    target["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    for target in panel["targets"]
]
PLOTTED = set(re.findall(r"\bray_[a-z0-9_]+", " ".join(QUERIES)))
APPLICATION = "metrics"
"""Not the name of other tests' services: Ray keeps the counters of applications that have ended."""
OF_GPUS = {"ray_node_gpus_utilization", "ray_node_gram_used"}


@pytest.fixture(scope="module")
def address(ray_local, cascade):
    """Where a service listens that nobody has asked anything."""
    from ray import serve

    from as2ray.serving.deployment import build_app

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = ServiceConfig.model_validate(
        {"models": {"cascade": cascade}, "replicas": {"num_cpus": 0.5}}
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(config), name=APPLICATION)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def read_until(address: str, is_complete: Callable[[str], bool], seconds: float = 900.0) -> str:
    """Our samples of an endpoint, once they are complete: Ray collects them every few seconds."""
    until = time.monotonic() + seconds
    while True:
        lines = httpx.get(f"{address}/metrics", timeout=300).text.splitlines(keepends=True)
        ours = (line for line in lines if f'application="{APPLICATION}"' in line)
        text = "".join([*ours, *(line for line in lines if "application=" not in line)])
        if is_complete(text):
            return text
        assert time.monotonic() < until, text
        time.sleep(1)


def values(text: str, name: str, **labels: str) -> float:
    """Sum of the samples of a metric with these labels."""
    lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.M)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for given, value in lines if all(one in given for one in wanted))


@pytest.mark.slow
def test_both_endpoints_have_every_plotted_metric_before_the_first_request(address):
    import ray

    [node] = [node for node in ray.nodes() if node["Alive"]]
    agent = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"

    def is_complete(text: str) -> bool:
        missing = PLOTTED - OF_GPUS - set(re.findall(r"^(\w+)(?=[{ ])", text, re.M))
        healthy = values(text, "ray_serve_deployment_replica_healthy", deployment="ranker")
        return not missing and healthy == 1

    for endpoint in (address, agent):  # the service's first: to ask it is a request, too
        text = read_until(endpoint, is_complete)
        for name in ("tokens_total", "candidates_exited_total", "batches_total", "queue_fill"):
            assert values(text, f"ray_as2ray_{name}") == pytest.approx(0)
        assert values(text, "ray_as2ray_rejected_total", code="overloaded") == pytest.approx(0)


@pytest.mark.slow
def test_a_ranking_is_counted_where_its_candidates_left(address):
    asked = {"question": QUESTION, "candidates": CANDIDATES}
    scored = httpx.post(f"{address}/rank", json=asked, timeout=3000).json()["num_scored"]
    assert httpx.post(f"{address}/rank", json={}, timeout=3000).status_code == 422

    def is_complete(text: str) -> bool:
        rejected = values(text, "ray_as2ray_rejected_total", code="invalid_request")
        return rejected >= 1 and values(text, "ray_as2ray_batches_total") >= 1

    text = read_until(address, is_complete)
    exited = [
        round(values(text, "ray_as2ray_candidates_exited_total", exit_layer=layer))
        for layer in "123"
    ]
    assert exited == [scored[0] - scored[1], scored[1] - scored[2], scored[2]]
    assert sum(exited) == len(CANDIDATES)
    assert values(text, "ray_as2ray_batches_total") == pytest.approx(1)
    assert 0 < values(text, "ray_as2ray_batch_fill_total") < 1
    assert 0 < values(text, "ray_as2ray_busy_seconds_total") < 60
    for path, status, count in (("/rank", "200", 1), ("/rank", "422", 1), ("/ask", "200", 0)):
        found = values(text, "ray_as2ray_requests_total", path=path, status=status)
        assert found == pytest.approx(count)


@pytest.mark.parametrize(
    ("exit_layers", "num_scored", "exited"),
    [((1, 3), (4, 3), {"0": 2, "1": 1, "3": 3}), ((1, 3), (6, 6), {"3": 6}), ((), (), {"all": 6})],
)
def test_candidates_that_never_reach_the_first_layer_are_counted_there(
    monkeypatch, exit_layers, num_scored, exited
):
    context = SimpleNamespace(app_name="a", deployment="d", replica_tag="r")
    monkeypatch.setattr(metrics.serve, "get_replica_context", lambda: context)
    monkeypatch.setenv(metrics.COLLECTION_VARIABLE, "0")
    ranking = [CandidateScore(index, 0.5) for index in range(6)]
    result = RerankResult("m", ranking, 60, exit_layers, num_scored)
    service_metrics = metrics.ServiceMetrics()
    service_metrics.record_request(RequestRecord("id", "/rank", 200, 0.1, None, result, None))
    counts = re.findall(
        r'^ray_as2ray_candidates_exited_total{.*exit_layer="(\w+)".*} (\S+)$',
        service_metrics.export(),
        re.M,
    )
    assert {layer: float(count) for layer, count in counts} == exited


def test_dashboard_plots_every_metric_and_no_other():
    owned = re.findall(r'"(as2ray_[a-z_]+)"', Path(metrics.__file__).read_text())
    plotted = {re.sub("_(total|bucket)$", "", name) for name in PLOTTED - metrics.RAY_METRICS}
    assert plotted == {f"ray_{name}" for name in owned}
    assert metrics.RAY_METRICS < PLOTTED
    assert {name.removeprefix("ray_") for name in OF_GPUS} <= METRICS_GAUGES.keys()


@pytest.mark.parametrize("query", QUERIES)
def test_query_is_promql_and_has_a_value_without_data(query):
    promql = pytest.importorskip("promql_parser")
    parsed = promql.parse(query.replace("$__rate_interval", "1m"))
    assert str(parsed).endswith(" or on () vector(0)")
    if " / " in query or "quantile" in query:  # 0 / 0 is a value, but not one that is drawn
        assert ">= 0 or on()" in query
