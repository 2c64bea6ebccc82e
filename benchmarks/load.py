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

PATIENCE = 120.0
"""Seconds that a client waits."""


@dataclass(frozen=True)
class Load:
    """What clients saw."""

    seconds: tuple[float, ...]
    """Latency of each answer."""
    refused: int
    """Answers 429 and 503."""
    failed: int
    """Any other answer, or none."""
    wall: float
    """From the first request to the last answer."""

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.seconds) / self.wall

    def quantile(self, part: float) -> float:
        """Of the latencies, in seconds; infinite where nothing was answered."""
        return float(np.quantile(self.seconds, part)) if self.seconds else float("inf")

    def as_json(self) -> dict[str, Any]:
        """Rates and quantiles."""
        parts = {f"p{100 * part:g}": self.quantile(part) for part in (0.5, 0.95, 0.99)}
        return {
            **parts,
            "rate": self.rate,
            "answered": len(self.seconds),
            "refused": self.refused,
            "failed": self.failed,
        }


def open_loop(url: str, bodies: Sequence[Any], rate: float, seconds: float) -> Load:
    """Requests at a constant rate.

    Args:
        url: Where to.
        bodies: JSON bodies, in turn.
        rate: Requests a second.
        seconds: How long requests leave.
    """
    return asyncio.run(_open(url, bodies, rate, max(1, round(rate * seconds))))


def closed_loop(url: str, bodies: Sequence[Any], clients: int, seconds: float) -> Load:
    """Clients that each ask again as soon as they are answered, or later if told so by a refusal.

    Args:
        url: Where to.
        bodies: JSON bodies, in turn.
        clients: How many ask at a time.
        seconds: After which no more requests leave.
    """
    return asyncio.run(_closed(url, bodies, clients, seconds))


class _Seen:
    def __init__(self, url: str) -> None:
        self.url = url
        self.latencies: list[float] = []
        self.refused = self.failed = 0

    async def ask(self, client: httpx.AsyncClient, body: Any, planned: float) -> float:
        """Seconds to stay away, as `Retry-After` says."""
        try:
            answer = await client.post(self.url, json=body)
        except httpx.HTTPError:
            self.failed += 1
            return 0.0
        if answer.status_code == 200:
            self.latencies.append(time.perf_counter() - planned)
        elif answer.status_code in (429, 503):
            self.refused += 1
        else:
            self.failed += 1
        return float(answer.headers.get("retry-after", 0))

    def told(self, began: float) -> Load:
        wall = time.perf_counter() - began
        return Load(tuple(self.latencies), self.refused, self.failed, wall)


def _client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=PATIENCE, limits=limits)


async def _open(url: str, bodies: Sequence[Any], rate: float, requests: int) -> Load:
    seen = _Seen(url)
    async with _client() as client, asyncio.TaskGroup() as group:
        began = time.perf_counter()  # a client takes time to make
        for number, body in zip(range(requests), itertools.cycle(bodies)):
            planned = began + number / rate
            await asyncio.sleep(max(0.0, planned - time.perf_counter()))
            group.create_task(seen.ask(client, body, planned))
    return seen.told(began)


async def _closed(url: str, bodies: Sequence[Any], clients: int, seconds: float) -> Load:
    seen, turn = _Seen(url), itertools.cycle(bodies)

    async def asking(client: httpx.AsyncClient, until: float) -> None:
        while time.perf_counter() < until:
            away = await seen.ask(client, next(turn), time.perf_counter())
            await asyncio.sleep(min(away, max(0.0, until - time.perf_counter())))

    async with _client() as client, asyncio.TaskGroup() as group:
        began = time.perf_counter()
        for _ in range(clients):
            group.create_task(asking(client, began + seconds))
    return seen.told(began)
