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

from as2ray.serving.service import Seen

SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
"""Upper edges of the histograms' buckets."""

PREFIX = "as2ray_"
"""Of all names; Ray puts `ray_` before it."""


class Observed:
    """Counts requests at a gateway."""

    def __init__(self) -> None:
        self.requests = Counter(
            f"{PREFIX}requests", "Requests that were answered.", tag_keys=("path", "status")
        )
        self.total = Histogram(
            f"{PREFIX}request_seconds", "Of a request, whole.", SECONDS, tag_keys=("path",)
        )
        self.steps = Histogram(
            f"{PREFIX}step_seconds",
            "Of a ranking's steps: read (tokenising), queue (waiting for a batch), rank.",
            SECONDS,
            tag_keys=("model", "step"),
        )
        self.tokens = Counter(f"{PREFIX}tokens", "Tokens ranked.", tag_keys=("model",))
        self.survivors = Counter(
            f"{PREFIX}survivors",
            "Candidates scored, by exit; `all` of a ranker without exits.",
            tag_keys=("model", "exit"),
        )
        self.relieved = Counter(
            f"{PREFIX}relieved", "Rankings with drop ratios raised under load.", tag_keys=("model",)
        )
        self.refused = Counter(f"{PREFIX}refused", "Requests refused.", tag_keys=("kind",))

    def observe(self, seen: Seen, known: Iterable[str]) -> None:
        """Counts a request.

        Args:
            seen: The request.
            known: Paths that have a name of their own; a label for each path that somebody tries
                would fill Prometheus.
        """
        path = seen.path if seen.path in known else "other"
        self.requests.inc(1, {"path": path, "status": str(seen.status)})
        self.total.observe(seen.seconds, {"path": path})
        if seen.refused is not None:
            self.refused.inc(1, {"kind": seen.refused.kind})
        answer = seen.answer
        if answer is None:
            return
        model = {"model": answer.model}
        for step, seconds in answer.seconds.items():
            self.steps.observe(seconds, {**model, "step": step})
        self.tokens.inc(answer.tokens, model)
        counts = {str(layer): n for layer, n in zip(answer.exits, answer.survivors)}
        for layer, count in (counts or {"all": len(answer.ranking)}).items():
            self.survivors.inc(count, {**model, "exit": layer})
        if answer.relieved:
            self.relieved.inc(1, model)


async def exported() -> str:
    """The service's metrics from the agents of all nodes, in Prometheus's text format."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]
    return merged(await asyncio.gather(*(asyncio.to_thread(_scrape, one) for one in addresses)))


def _scrape(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, HTTPException):  # a node that has just gone, or whose agent is not up yet
        return ""


def merged(texts: Iterable[str]) -> str:
    """Several nodes' metrics as one text, as2ray's alone, the lines of each metric together."""
    families: dict[str, dict[str, None]] = defaultdict(dict)
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ")[2]
            if f"_{PREFIX}" in family:
                families[family][line] = None
    lines = (line for family in families.values() for line in family)
    return "".join(f"{line}\n" for line in lines)
