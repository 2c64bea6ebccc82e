"""Metrics of the service, by Ray to Prometheus; `serve_configs/grafana.json` draws them.

Knows Ray Serve's metrics. Must not know HTTP or rankers.
"""

import asyncio
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from http.client import HTTPException

import ray
from ray.serve.metrics import Counter, Histogram

from as2ray.serving.service import RequestRecord

LATENCY_BUCKETS_S = [
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
]
"""Upper edges of the histograms' buckets."""

METRIC_PREFIX = "as2ray_"
"""Of all names; Ray puts `ray_` before it."""


class ServiceMetrics:
    """Counts requests at a gateway."""

    def __init__(self) -> None:
        self.requests = Counter(
            f"{METRIC_PREFIX}requests", "Requests that were answered.", tag_keys=("path", "status")
        )
        self.request_seconds = Histogram(
            f"{METRIC_PREFIX}request_seconds",
            "Of a request, whole.",
            LATENCY_BUCKETS_S,
            tag_keys=("path",),
        )
        self.phase_seconds = Histogram(
            f"{METRIC_PREFIX}step_seconds",
            "Of a ranking's steps: read (tokenising), queue (waiting for a batch), rank.",
            LATENCY_BUCKETS_S,
            tag_keys=("model", "step"),
        )
        self.tokens = Counter(f"{METRIC_PREFIX}tokens", "Tokens ranked.", tag_keys=("model",))
        self.candidates_scored = Counter(
            f"{METRIC_PREFIX}survivors",
            "Candidates scored, by exit; `all` of a ranker without exits.",
            tag_keys=("model", "exit"),
        )
        self.load_shed = Counter(
            f"{METRIC_PREFIX}relieved",
            "Rankings with drop ratios raised under load.",
            tag_keys=("model",),
        )
        self.rejected = Counter(f"{METRIC_PREFIX}refused", "Requests refused.", tag_keys=("kind",))

    def record_request(self, record: RequestRecord, known_paths: Iterable[str]) -> None:
        """Counts a request.

        Args:
            seen: The request.
            known: Paths that have a name of their own; a label for each path that somebody tries
                would fill Prometheus.
        """
        path = record.path if record.path in known_paths else "other"
        self.requests.inc(1, {"path": path, "status": str(record.status_code)})
        self.request_seconds.observe(record.duration_s, {"path": path})
        if record.error is not None:
            self.rejected.inc(1, {"kind": record.error.code})
        answer = record.result
        if answer is None:
            return
        model = {"model": answer.model}
        for step, seconds in answer.timings_s.items():
            self.phase_seconds.observe(seconds, {**model, "step": step})
        self.tokens.inc(answer.num_tokens, model)
        counts = {str(layer): n for layer, n in zip(answer.exit_layers, answer.num_scored)}
        for layer, count in (counts or {"all": len(answer.ranking)}).items():
            self.candidates_scored.inc(count, {**model, "exit": layer})
        if answer.load_shed:
            self.load_shed.inc(1, model)


async def collect_metrics() -> str:
    """The service's metrics from the agents of all nodes, in Prometheus's text format."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
    return merge_metrics(
        await asyncio.gather(*(asyncio.to_thread(_scrape, one) for one in addresses))
    )


def _scrape(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, HTTPException):  # a node that has just gone, or whose agent is not up yet
        return ""


def merge_metrics(texts: Iterable[str]) -> str:
    """Several nodes' metrics as one text, as2ray's alone, the lines of each metric together."""
    families: dict[str, dict[str, None]] = defaultdict(dict)
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ")[2]
            if f"_{METRIC_PREFIX}" in family:
                families[family][line] = None
    lines = (line for family in families.values() for line in family)
    return "".join(f"{line}\n" for line in lines)
