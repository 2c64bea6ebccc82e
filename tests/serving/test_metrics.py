"""The metrics of a service, and the dashboard that plots them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

from as2ray.serving import metrics
from as2ray.serving.batch_queue import BatchQueue
from as2ray.serving.types import (
    CandidateScore,
    ErrorCode,
    RequestRecord,
    RerankResult,
    overloaded_error,
)

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


def read_samples(service_metrics: metrics.ServiceMetrics) -> dict[str, float]:
    """Values by name and own labels, such as `tokens_total model=m`; of histograms the sums."""
    replica = {"application": "a", "deployment": "d", "replica": "r"}
    values = {}
    for family in text_string_to_metric_families(service_metrics.export()):
        for sample in family.samples:
            if sample.name.endswith(("_total", "_sum")) or family.type == "gauge":
                assert replica.items() <= sample.labels.items()
                own = {k: v for k, v in sample.labels.items() if k not in replica}
                name = sample.name.removeprefix("ray_as2ray_")
                values[" ".join([name, *(f"{k}={v}" for k, v in own.items())])] = sample.value
    return values


@pytest.mark.usefixtures("in_replica")
def test_gateway_exports_all_its_counters_before_the_first_request():
    service_metrics = metrics.ServiceMetrics()
    service_metrics.start_gateway(["m", "n"])
    samples = read_samples(service_metrics)
    assert {name for name, value in samples.items() if value == metrics.ZERO} == {
        *(f"requests_total path={path} status=200" for path in metrics.LABELED_PATHS),
        *(f"rejected_total code={code}" for code in get_args(ErrorCode)),
        *(f"{name}_total model={model}" for name in ("tokens", "load_shed") for model in "mn"),
    }


@pytest.fixture
def queue() -> BatchQueue:
    """A queue with a quarter of its tokens, in two requests."""
    queue = BatchQueue(lambda *_: [], max_batch_tokens=100, max_queued_tokens=400, num_workers=2)
    queue.queue, queue.queued_tokens = ["a", "b"], 100
    return queue


@pytest.mark.usefixtures("in_replica")
def test_replica_exports_its_queue_batches_and_rejected_models(queue):
    service_metrics = metrics.ServiceMetrics()
    service_metrics.start_replica(queue)
    counters = ("batches_total", "batch_fill_total", "busy_seconds_total", "rejected_models_total")
    samples = read_samples(service_metrics)
    assert samples == {
        **dict.fromkeys(counters, metrics.ZERO),
        "queued_requests": 2,
        "queue_fill": 0.25,
    }
    for num_tokens in (25, 150):  # a larger request than a batch is ranked alone
        service_metrics.record_batch(num_tokens, 0.5, queue)
    service_metrics.record_rejected_models()
    queue.queue, queue.queued_tokens = [], 0
    service_metrics.record_queue(queue)
    assert read_samples(service_metrics) == {
        "batches_total": 2,
        "batch_fill_total": 1.25,
        "busy_seconds_total": 0.5,  # a worker of two ranked for a second
        "rejected_models_total": 1,
        "queued_requests": 0,
        "queue_fill": 0,
    }


@pytest.mark.usefixtures("in_replica")
def test_loaded_model_has_its_seconds_and_counters_of_its_exits():
    service_metrics = metrics.ServiceMetrics()
    service_metrics.record_load("m", (2, 4), 1.5)
    service_metrics.record_load("n", (), 0.5)
    assert {k: v for k, v in read_samples(service_metrics).items() if "phase" in k} == {
        "phase_seconds_sum model=m phase=load": 1.5,
        "phase_seconds_sum model=n phase=load": 0.5,
    }
    exits = {k: v for k, v in read_samples(service_metrics).items() if "exit_layer" in k}
    assert exits == dict.fromkeys(
        (
            "candidates_exited_total exit_layer=2 model=m",
            "candidates_exited_total exit_layer=4 model=m",
            "candidates_exited_total exit_layer=all model=n",
        ),
        metrics.ZERO,
    )


@pytest.mark.usefixtures("in_replica")
def test_requests_are_counted_by_path_status_and_error():
    service_metrics = metrics.ServiceMetrics()
    result = RerankResult("m", [], 30, load_shed=True)
    error = overloaded_error("full", 1)
    for path, status, duration_s, *outcome in (
        ("/rank", 200, 0.25, result, None),
        ("/rank", 200, 0.5, result, None),
        ("/rank", 429, 0.125, None, error),
        ("/tried", 404, 0.0625, None, None),
    ):
        record = RequestRecord("id", path, status, duration_s, None, *outcome)
        service_metrics.record_request(record)
    assert (
        read_samples(service_metrics).items()
        >= {
            "requests_total path=/rank status=200": 2,
            "requests_total path=/rank status=429": 1,
            "requests_total path=other status=404": 1,
            "request_seconds_sum path=/rank": 0.875,
            "request_seconds_sum path=other": 0.0625,
            "rejected_total code=overloaded": 1,
            "tokens_total model=m": 60,
            "load_shed_total model=m": 2,
        }.items()
    )


@pytest.mark.usefixtures("in_replica")
def test_histograms_have_the_buckets_of_the_dashboard_and_counters_no_time_of_creation():
    service_metrics = metrics.ServiceMetrics()
    service_metrics.record_request(RequestRecord("id", "/", 200, 0.3, None, None, None))
    text = service_metrics.export()
    buckets = re.findall(r'request_seconds_bucket{.*le="([^"]+)".*} (\S+)', text)
    assert [float(bound) for bound, _ in buckets] == [*metrics.BUCKETS_S, float("inf")]
    assert [float(count) for _, count in buckets] == [0] * 8 + [1] * 7
    assert "_created" not in text


@pytest.mark.parametrize(
    ("value", "counts"),
    [(None, False), ("1", False), ("true", False), ("0", True), ("false", True), ("False", True)],
)
def test_metrics_are_counted_in_the_process_where_ray_collects_none(value, counts, monkeypatch):
    monkeypatch.delenv(metrics.COLLECTION_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(metrics.COLLECTION_VARIABLE, value)
    assert metrics.counts_in_process() is counts


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
