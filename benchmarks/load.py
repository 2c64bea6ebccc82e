"""Clients of a rerank service: an open loop at a constant rate, and a closed loop.

In an open loop requests are sent at planned times, whether or not earlier ones are answered. Their
latency counts from the planned time, so that a service that stalls pays for all requests that
arrived meanwhile.
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
"""Seconds that a client waits for an answer."""


@dataclass(frozen=True)
class LoadResult:
    """Answers and latencies that clients measured."""

    latencies_s: tuple[float, ...]
    """Latency of each answer with status 200."""
    num_rejected: int
    """Answers with status 429 or 503."""
    num_failed: int
    """Other answers, and requests without an answer."""
    duration_s: float
    """Seconds from the first request to the last answer."""

    @property
    def answers_per_second(self) -> float:
        """Answers per second."""
        return len(self.latencies_s) / self.duration_s

    def quantile(self, q: float) -> float:
        """Returns a quantile of the latencies in seconds; infinity if there is no answer."""
        return float(np.quantile(self.latencies_s, q)) if self.latencies_s else float("inf")

    def as_json(self) -> dict[str, Any]:
        """Returns the rate, the counts and quantiles of the latency."""
        quantiles = {f"p{100 * q:g}": self.quantile(q) for q in (0.5, 0.95, 0.99)}
        return {
            **quantiles,
            "answers_per_second": self.answers_per_second,
            "num_answered": len(self.latencies_s),
            "num_rejected": self.num_rejected,
            "num_failed": self.num_failed,
        }


def run_open_loop(
    url: str, bodies: Sequence[Any], requests_per_second: float, duration_s: float
) -> LoadResult:
    """Sends requests at a constant rate.

    Args:
        url: Address of the service.
        bodies: JSON bodies, used in turn.
        requests_per_second: The rate.
        duration_s: Seconds during which requests are sent; at least one is.
    """
    num_requests = max(1, round(requests_per_second * duration_s))
    return asyncio.run(_send_at_rate(url, bodies, requests_per_second, num_requests))


def run_closed_loop(
    url: str, bodies: Sequence[Any], num_clients: int, duration_s: float
) -> LoadResult:
    """Runs clients that send the next request after each answer, or after its `Retry-After`.

    Args:
        url: Address of the service.
        bodies: JSON bodies, used in turn.
        num_clients: Number of clients at the same time.
        duration_s: Seconds after which no more requests are sent.
    """
    return asyncio.run(_run_clients(url, bodies, num_clients, duration_s))


class _LoadRecorder:
    def __init__(self, url: str) -> None:
        self.url = url
        self.latencies_s: list[float] = []
        self.num_rejected = self.num_failed = 0

    async def send(self, client: httpx.AsyncClient, body: Any, planned_at: float) -> float:
        """Sends a request; returns the seconds of the answer's `Retry-After`, or 0."""
        try:
            response = await client.post(self.url, json=body)
        except httpx.HTTPError:
            self.num_failed += 1
            return 0.0
        if response.status_code == 200:
            self.latencies_s.append(time.perf_counter() - planned_at)
        elif response.status_code in (429, 503):
            self.num_rejected += 1
        else:
            self.num_failed += 1
        return float(response.headers.get("retry-after", 0))

    def to_result(self, started_at: float) -> LoadResult:
        duration_s = time.perf_counter() - started_at
        return LoadResult(tuple(self.latencies_s), self.num_rejected, self.num_failed, duration_s)


def _create_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits)


async def _send_at_rate(
    url: str, bodies: Sequence[Any], requests_per_second: float, num_requests: int
) -> LoadResult:
    recorder = _LoadRecorder(url)
    async with _create_client() as client, asyncio.TaskGroup() as group:
        started_at = time.perf_counter()  # creating a client takes time
        for number, body in zip(range(num_requests), itertools.cycle(bodies)):
            planned_at = started_at + number / requests_per_second
            await asyncio.sleep(max(0.0, planned_at - time.perf_counter()))
            group.create_task(recorder.send(client, body, planned_at))
    return recorder.to_result(started_at)


async def _run_clients(
    url: str, bodies: Sequence[Any], num_clients: int, duration_s: float
) -> LoadResult:
    recorder, next_bodies = _LoadRecorder(url), itertools.cycle(bodies)

    async def run_client(client: httpx.AsyncClient, deadline: float) -> None:
        while time.perf_counter() < deadline:
            retry_after = await recorder.send(client, next(next_bodies), time.perf_counter())
            await asyncio.sleep(min(retry_after, max(0.0, deadline - time.perf_counter())))

    async with _create_client() as client, asyncio.TaskGroup() as group:
        started_at = time.perf_counter()
        for _ in range(num_clients):
            group.create_task(run_client(client, started_at + duration_s))
    return recorder.to_result(started_at)
