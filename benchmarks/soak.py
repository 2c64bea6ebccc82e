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

from benchmarks.load import run_open_loop
from benchmarks.memory import MB, get_private_bytes
from benchmarks.report import Claim

LOAD_SHARE = 0.8
"""Part of the sustained rate."""


def run_soak(
    url: str,
    pid: int,
    bodies: Sequence[Any],
    sustained_rate: float,
    p99_bound_s: float,
    duration_s: float,
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
    with ProcessMemoryMonitor(pid) as memory:
        load = run_open_loop(url, bodies, LOAD_SHARE * sustained_rate, duration_s)
    early, late, p99 = memory.median_of_fifth(1), memory.median_of_fifth(4), load.quantile(0.99)
    told = f"soak, {len(load.latencies_s):,} requests, {LOAD_SHARE * sustained_rate:.1f} a second"
    lost = load.num_rejected + load.num_failed
    claims = [
        Claim(
            f"{told}: memory within 10 %",
            f"{early:,.0f} and {late:,.0f} MB ({late / early:.2f})",
            abs(late / early - 1) <= 0.1,
        ),
        Claim(
            f"{told}: p99 <= {p99_bound_s:g} s, all answered",
            f"{p99:.2f} s, {lost} not",
            not lost and p99 <= p99_bound_s,
        ),
    ]
    return {"load": load.as_json(), "memory, MB": memory.samples_mb}, claims


class ProcessMemoryMonitor:
    """The private memory of a process and of all that it started, while a load lasts.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self.samples_mb: list[float] = []
        """Sum over the processes at each look, MB."""
        self._process = psutil.Process(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ProcessMemoryMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def median_of_fifth(self, index: int) -> float:
        """Median of a fifth of the looks, from 0."""
        return float(np.median(np.array_split(self.samples_mb, 5)[index]))

    def _run(self) -> None:
        while not self._stopped.wait(0.5):
            total = 0.0
            for process in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.Error):  # it ended
                    total += get_private_bytes(process)
            self.samples_mb.append(total / MB)
