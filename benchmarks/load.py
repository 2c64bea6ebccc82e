"""Clients of a rerank service: an open loop of constant arrivals, and a closed one.

Knows HTTP and clocks. Must not know who answers.

In an open loop requests leave when the plan says, answered or not, and a latency counts from the
planned moment: a service that stalls is charged for everybody who came meanwhile.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

REQUEST_TIMEOUT_S = 120.0
"""Seconds that a client waits."""


@dataclass(frozen=True)
class LoadResult:
    """What clients saw."""

    latencies_s: tuple[float, ...]
    """Latency of each answer."""
    num_rejected: int
    """Answers 429 and 503."""
    num_failed: int
    """Any other answer, or none."""
    duration_s: float
    """From the first request to the last answer."""

    @property
    def answers_per_second(self) -> float:
        """Answers a second."""
        return len(self.latencies_s) / self.duration_s

    def quantile(self, q: float) -> float:
        """Of the latencies, in seconds; infinite where nothing was answered."""
        return float(np.quantile(self.latencies_s, q)) if self.latencies_s else float("inf")

    def as_json(self) -> dict[str, Any]:
        """Rates and quantiles."""
        parts = {f"p{100 * part:g}": self.quantile(part) for part in (0.5, 0.95, 0.99)}
        return {
            **parts,
            "rate": self.answers_per_second,
            "answered": len(self.latencies_s),
            "refused": self.num_rejected,
            "failed": self.num_failed,
        }


def run_open_loop(
    url: str, bodies: Sequence[Any], requests_per_second: float, duration_s: float
) -> LoadResult:
    """Requests at a constant rate.

    Args:
        url: Where to.
        bodies: JSON bodies, in turn.
        rate: Requests a second.
        seconds: How long requests leave.
    """
    return asyncio.run(
        _send_at_rate(
            url, bodies, requests_per_second, max(1, round(requests_per_second * duration_s))
        )
    )


def run_closed_loop(
    url: str, bodies: Sequence[Any], num_clients: int, duration_s: float
) -> LoadResult:
    """Clients that each ask again as soon as they are answered, or later if told so by a refusal.

    Args:
        url: Where to.
        bodies: JSON bodies, in turn.
        clients: How many ask at a time.
        seconds: After which no more requests leave.
    """
    return asyncio.run(_run_clients(url, bodies, num_clients, duration_s))


class _LoadRecorder:
    def __init__(self, url: str) -> None:
        self.url = url
        self.latencies_s: list[float] = []
        self.num_rejected = self.num_failed = 0

    async def send(self, client: httpx.AsyncClient, body: Any, planned_at: float) -> float:
        """Seconds to stay away, as `Retry-After` says."""
        try:
            answer = await client.post(self.url, json=body)
        except httpx.HTTPError:
            self.num_failed += 1
            return 0.0
        if answer.status_code == 200:
            self.latencies_s.append(time.perf_counter() - planned_at)
        elif answer.status_code in (429, 503):
            self.num_rejected += 1
        else:
            self.num_failed += 1
        return float(answer.headers.get("retry-after", 0))

    def to_result(self, started_at: float) -> LoadResult:
        wall = time.perf_counter() - started_at
        return LoadResult(tuple(self.latencies_s), self.num_rejected, self.num_failed, wall)


def _create_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits)


async def _send_at_rate(
    url: str, bodies: Sequence[Any], requests_per_second: float, num_requests: int
) -> LoadResult:
    seen = _LoadRecorder(url)
    async with _create_client() as client, asyncio.TaskGroup() as group:
        began = time.perf_counter()  # a client takes time to make
        for number, body in zip(range(num_requests), itertools.cycle(bodies)):
            planned = began + number / requests_per_second
            await asyncio.sleep(max(0.0, planned - time.perf_counter()))
            group.create_task(seen.send(client, body, planned))
    return seen.to_result(began)


async def _run_clients(
    url: str, bodies: Sequence[Any], num_clients: int, duration_s: float
) -> LoadResult:
    seen, turn = _LoadRecorder(url), itertools.cycle(bodies)

    async def asking(client: httpx.AsyncClient, until: float) -> None:
        while time.perf_counter() < until:
            away = await seen.send(client, next(turn), time.perf_counter())
            await asyncio.sleep(min(away, max(0.0, until - time.perf_counter())))

    async with _create_client() as client, asyncio.TaskGroup() as group:
        began = time.perf_counter()
        for _ in range(num_clients):
            group.create_task(asking(client, began + duration_s))
    return seen.to_result(began)
