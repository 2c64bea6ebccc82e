"""Metrics of the service for Prometheus, plotted by `serve_configs/grafana.json`."""

import asyncio
import os
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import prometheus_client
import ray
from ray import serve
from ray.serve import metrics as ray_metrics

from as2ray.serving.types import ErrorCode, RequestRecord

if TYPE_CHECKING:
    from as2ray.serving.batch_queue import BatchQueue

BUCKETS_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
"""Upper bounds of the histograms' buckets."""

LABELED_PATHS = (
    *("/", "/ask", "/rank", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/info", "/health", "/ready", "/metrics"),
)
"""Paths with a label of their own. All others share one: a label for every path that somebody
tries would fill Prometheus."""


RAY_METRICS = frozenset(
    {
        "ray_serve_deployment_queued_queries",
        "ray_serve_deployment_replica_healthy",
        "ray_serve_autoscaling_target_replicas",
        "ray_node_cpu_utilization",
        "ray_node_mem_used",
        "ray_node_gpus_utilization",
        "ray_node_gram_used",
    }
)
"""Ray's own metrics that the dashboard plots; those of GPUs exist on nodes with a GPU."""

ZERO = sys.float_info.min
"""Start of a counter: Ray exports no counter before its first increment, and none may be 0."""


METRICS_TIMEOUT_S = 2.0
"""Seconds that a gateway waits for the metrics of the other processes."""

COLLECTION_VARIABLE = "RAY_enable_metrics_collection"
"""Environment variable with which Ray starts no metrics port; Ray binds it to all addresses."""


def counts_in_process() -> bool:
    """Returns whether metrics are counted in each process, because Ray collects none."""
    return os.environ.get(COLLECTION_VARIABLE, "1").lower() in ("0", "false")


class _InProcessMetric:
    """A metric of Prometheus's client with the interface and labels of Ray Serve's."""

    def __init__(
        self,
        metric_type: Any,
        registry: prometheus_client.CollectorRegistry,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        **options: Any,
    ) -> None:
        context = serve.get_replica_context()
        self.shared_labels = {
            "application": context.app_name,
            "deployment": context.deployment,
            "replica": context.replica_tag,
        }
        labels = (*labels, *self.shared_labels)
        self.metric = metric_type(f"ray_{name}", description, labels, registry=registry, **options)

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        self._labeled(tags).inc(value)

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._labeled(tags).set(value)

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._labeled(tags).observe(value)

    def _labeled(self, tags: Mapping[str, str] | None) -> Any:
        return self.metric.labels(**(tags or {}), **self.shared_labels)


def _ray_histogram(
    buckets: list[float], name: str, description: str, labels: tuple[str, ...]
) -> ray_metrics.Histogram:
    return ray_metrics.Histogram(name, description, buckets, labels)


class ServiceMetrics:
    """Metrics of a gateway or replica, each with its labels; Ray adds `ray_` to the names."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        counter: Any = ray_metrics.Counter
        gauge: Any = ray_metrics.Gauge
        histogram: Any = partial(_ray_histogram, BUCKETS_S)
        if counts_in_process():
            prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
            counter = partial(_InProcessMetric, prometheus_client.Counter, self.registry)
            gauge = partial(_InProcessMetric, prometheus_client.Gauge, self.registry)
            histogram = partial(
                _InProcessMetric, prometheus_client.Histogram, self.registry, buckets=BUCKETS_S
            )
        self.requests = counter("as2ray_requests", "Finished requests.", ("path", "status"))
        self.request_seconds = histogram(
            "as2ray_request_seconds", "Duration of a request.", ("path",)
        )
        self.phase_seconds = histogram(
            "as2ray_phase_seconds",
            "Duration of a ranking's phases: tokenize, queue (waiting for a batch), inference; and "
            "of load, which makes a model ready to rank.",
            ("model", "phase"),
        )
        self.tokens = counter("as2ray_tokens", "Ranked tokens.", ("model",))
        self.candidates_exited = counter(
            "as2ray_candidates_exited",
            "Candidates that left after each exit, 0 before the first layer; `all` for a ranker "
            "without exits.",
            ("model", "exit_layer"),
        )
        self.load_shed = counter(
            "as2ray_load_shed", "Rankings whose drop ratios were raised under load.", ("model",)
        )
        self.rejected = counter("as2ray_rejected", "Requests with an error response.", ("code",))
        self.rejected_models = counter(
            "as2ray_rejected_models", "Changes of models that could not be loaded."
        )
        self.queued_requests = gauge("as2ray_queued_requests", "Requests that wait for a batch.")
        self.queue_fill = gauge(
            "as2ray_queue_fill", "Queued tokens as a share of those that may be queued."
        )
        self.batches = counter("as2ray_batches", "Ranked batches.")
        self.batch_fill = counter(
            "as2ray_batch_fill", "Sum over batches of their tokens as a share of max_batch_tokens."
        )
        self.busy_seconds = counter(
            "as2ray_busy_seconds", "Seconds in which a replica ranked, averaged over its workers."
        )

    def export(self) -> str:
        """Returns what is counted in this process, in Prometheus's text format."""
        return prometheus_client.generate_latest(self.registry).decode()

    def start_gateway(self, models: Iterable[str]) -> None:
        """Exports the counters of a gateway before its first request."""
        for path in LABELED_PATHS:
            self.requests.inc(ZERO, {"path": path, "status": "200"})
        for code in get_args(ErrorCode):
            self.rejected.inc(ZERO, {"code": code})
        for model in models:
            self.tokens.inc(ZERO, {"model": model})
            self.load_shed.inc(ZERO, {"model": model})

    def start_replica(self, queue: "BatchQueue") -> None:
        """Exports the counters and gauges of a replica before its first request."""
        for counter in (self.batches, self.batch_fill, self.busy_seconds, self.rejected_models):
            counter.inc(ZERO)
        self.record_queue(queue)

    def record_load(self, model: str, exit_layers: Sequence[int], duration_s: float) -> None:
        """Counts a model that a replica has loaded."""
        self.phase_seconds.observe(duration_s, {"model": model, "phase": "load"})
        for layer in exit_layers or ("all",):
            self.candidates_exited.inc(ZERO, {"model": model, "exit_layer": str(layer)})

    def record_rejected_models(self) -> None:
        """Counts a change of models that could not be loaded."""
        self.rejected_models.inc()

    def record_queue(self, queue: "BatchQueue") -> None:
        """Exports how full the queue of a replica is."""
        self.queued_requests.set(len(queue.queue))
        self.queue_fill.set(queue.fill_level)

    def record_batch(self, num_tokens: int, duration_s: float, queue: "BatchQueue") -> None:
        """Counts a ranked batch."""
        self.batches.inc()
        self.batch_fill.inc(min(1.0, num_tokens / queue.max_batch_tokens))
        self.busy_seconds.inc(duration_s / queue.num_workers)

    def record_request(self, record: RequestRecord) -> None:
        """Counts a finished request."""
        path = record.path if record.path in LABELED_PATHS else "other"
        self.requests.inc(1, {"path": path, "status": str(record.status_code)})
        self.request_seconds.observe(record.duration_s, {"path": path})
        if record.error is not None:
            self.rejected.inc(1, {"code": record.error.code})
        result = record.result
        if result is None:
            return
        model = {"model": result.model}
        for phase, duration_s in result.timings_s.items():
            self.phase_seconds.observe(duration_s, {**model, "phase": phase})
        self.tokens.inc(result.num_tokens, model)
        # Stage zero and budgets keep candidates from the first layer.
        num_scored = (len(result.ranking), *result.num_scored, 0)
        layers = (0, *result.exit_layers) if result.exit_layers else ("all",)
        for layer, (scored, kept) in zip(layers, pairwise(num_scored)):
            if scored > kept:
                labels = {**model, "exit_layer": str(layer)}
                self.candidates_exited.inc(scored - kept, labels)
        if result.load_shed:
            self.load_shed.inc(1, model)


async def collect_metrics() -> str:
    """Collects the metrics of all nodes, in Prometheus's text format."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
    scrapes = [asyncio.to_thread(_scrape, address) for address in addresses]
    return merge_metrics(await asyncio.gather(*scrapes))


def _scrape(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
            return str(response.read(), "utf-8")
    except (OSError, HTTPException):  # the node has just ended, or its agent has not started
        return ""


def merge_metrics(texts: Iterable[str]) -> str:
    """Merges the dashboard's metrics of several nodes, with all lines of a metric together."""
    families: dict[str, dict[str, None]] = defaultdict(dict)
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ")[2]
            if "_as2ray_" in family or family in RAY_METRICS:
                families[family][line] = None
    return "".join(f"{line}\n" for family in families.values() for line in family)
