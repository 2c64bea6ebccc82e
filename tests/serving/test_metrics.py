"""The metrics of a service, and the dashboard that plots them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

from as2ray.serving import metrics
from as2ray.serving.types import CandidateScore, RequestRecord, RerankResult

DASHBOARD = Path(__file__).parents[2] / "serve_configs" / "grafana.json"
QUERIES = [
    target["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    for target in panel["targets"]
]
PLOTTED = set(re.findall(r"\bray_[a-z0-9_]+", " ".join(QUERIES)))
OF_GPUS = {"ray_node_gpus_utilization", "ray_node_gram_used"}


@pytest.fixture
def in_replica(monkeypatch):
    """Metrics as a replica has them that exports them itself."""
    context = SimpleNamespace(app_name="a", deployment="d", replica_tag="r")
    monkeypatch.setattr(metrics.serve, "get_replica_context", lambda: context)
    monkeypatch.setenv(metrics.COLLECTION_VARIABLE, "0")


@pytest.mark.usefixtures("in_replica")
def test_phase_of_a_request_has_its_seconds_and_the_labels_of_the_replica():
    result = RerankResult("m", [CandidateScore(0, 0.5)], 9, timings_s={"queue": 0.25})
    service_metrics = metrics.ServiceMetrics()
    service_metrics.record_request(RequestRecord("id", "/rank", 200, 0.5, None, result, None))
    line = re.search(r"^(ray_as2ray_\w+_sum){(.*phase.*)} (\S+)$", service_metrics.export(), re.M)
    assert line is not None
    labels = 'application="a",deployment="d",model="m",phase="queue",replica="r"'
    assert sorted(line[2].split(",")) == labels.split(",")
    assert float(line[3]) == 0.25


@pytest.mark.usefixtures("in_replica")
@pytest.mark.parametrize(
    ("exit_layers", "num_scored", "exited"),
    [((1, 3), (4, 3), {"0": 2, "1": 1, "3": 3}), ((1, 3), (6, 6), {"3": 6}), ((), (), {"all": 6})],
)
def test_candidates_that_never_reach_the_first_layer_are_counted_there(
    exit_layers, num_scored, exited
):
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
