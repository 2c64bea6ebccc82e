"""A soak: a service at 80 % of the rate that it sustains, and its memory meanwhile.

Knows a service as processes, and its clients. Must not know how it answers.

Memory is that of every process of the service, without shared pages, summed and looked at twice a
second. What is claimed is that it lies flat: the median of the last fifth of the time is within a
tenth of that of the second fifth. The first fifth is the service growing into its load.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import psutil

from benchmarks.load import open_loop
from benchmarks.memory import MB, private
from benchmarks.report import Claim

LOAD = 0.8
"""Part of the sustained rate."""


def soak(
    url: str, pid: int, bodies: Sequence[Any], sustained: float, bound: float, seconds: float
) -> tuple[dict[str, Any], list[Claim]]:
    """Loads a service for long.

    Args:
        url: Where to.
        pid: Of the service's first process.
        bodies: JSON bodies, in turn.
        sustained: Requests a second.
        bound: Seconds that p99 may take.
        seconds: How long.
    """
    with Followed(pid) as memory:
        load = open_loop(url, bodies, LOAD * sustained, seconds)
    early, late, p99 = memory.fifth(1), memory.fifth(4), load.quantile(0.99)
    told = f"soak, {len(load.seconds):,} requests, {LOAD * sustained:.1f} a second"
    lost = load.refused + load.failed
    claims = [
        Claim(
            f"{told}: memory within 10 %",
            f"{early:,.0f} and {late:,.0f} MB ({late / early:.2f})",
            abs(late / early - 1) <= 0.1,
        ),
        Claim(
            f"{told}: p99 <= {bound:g} s, all answered",
            f"{p99:.2f} s, {lost} not",
            not lost and p99 <= bound,
        ),
    ]
    return {"load": load.as_json(), "memory, MB": memory.seen}, claims


class Followed:
    """The private memory of a process and of all that it started, while a load lasts.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self.seen: list[float] = []
        """Sum over the processes at each look, MB."""
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Followed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def fifth(self, number: int) -> float:
        """Median of a fifth of the looks, from 0."""
        return float(np.median(np.array_split(self.seen, 5)[number]))

    def _run(self) -> None:
        while not self._over.wait(0.5):
            total = 0.0
            for process in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.Error):  # it ended
                    total += private(process)
            self.seen.append(total / MB)
