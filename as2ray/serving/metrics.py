"""Metrics of the service for Prometheus, plotted by `serve_configs/grafana.json`."""

import asyncio
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from http.client import HTTPException

import ray
from ray.serve.metrics import Counter, Histogram

from as2ray.serving.types import RequestRecord

BUCKETS_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
"""Upper bounds of the histograms' buckets."""

LABELED_PATHS = (
    *("/", "/ask", "/rank", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/info", "/health", "/metrics"),
)
"""Paths with a label of their own. All others share one: a label for every path that somebody
tries would fill Prometheus."""


class ServiceMetrics:
    """Counters and histograms of a gateway, each with its labels; Ray adds `ray_` to the names."""

    def __init__(self) -> None:
        self.requests = Counter("as2ray_requests", "Finished requests.", ("path", "status"))
        self.request_seconds = Histogram(
            "as2ray_request_seconds", "Duration of a request.", BUCKETS_S, ("path",)
        )
        self.phase_seconds = Histogram(
            "as2ray_phase_seconds",
            "Duration of a ranking's phases: tokenize, queue (waiting for a batch), inference.",
            BUCKETS_S,
            ("model", "phase"),
        )
        self.tokens = Counter("as2ray_tokens", "Ranked tokens.", ("model",))
        self.candidates_scored = Counter(
            "as2ray_candidates_scored",
            "Candidates that each exit scored; `all` for a ranker without exits.",
            ("model", "exit_layer"),
        )
        self.load_shed = Counter(
            "as2ray_load_shed", "Rankings whose drop ratios were raised under load.", ("model",)
        )
        self.rejected = Counter("as2ray_rejected", "Requests with an error response.", ("code",))

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
        counts = {str(layer): n for layer, n in zip(result.exit_layers, result.num_scored)}
        for layer, count in (counts or {"all": len(result.ranking)}).items():
            self.candidates_scored.inc(count, {**model, "exit_layer": layer})
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
    """Merges as2ray's metrics of several nodes, with all lines of a metric together."""
    families: dict[str, dict[str, None]] = defaultdict(dict)
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ")[2]
            if "_as2ray_" in family:
                families[family][line] = None
    return "".join(f"{line}\n" for family in families.values() for line in family)
