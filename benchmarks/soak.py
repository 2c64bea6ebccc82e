"""Soak test: loads a service at 80 % of its sustained rate and measures its memory.

Memory is the sum over all processes of the service, without shared pages, sampled twice a second.
The claim is that it is flat: its median in the last fifth of the time is within 10 % of that in the
second fifth. In the first fifth the service warms up.
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
"""Share of the sustained rate."""


def run_soak(
    url: str,
    pid: int,
    bodies: Sequence[Any],
    sustained_rate: float,
    p99_bound_s: float,
    duration_s: float,
) -> tuple[dict[str, Any], list[Claim]]:
    """Loads a service for a long time; returns results and claims.

    Args:
        url: Address of the service.
        pid: Id of the service's first process.
        bodies: JSON bodies, used in turn.
        sustained_rate: Requests per second that the service sustains.
        p99_bound_s: Bound on the 99th percentile of the latency, in seconds.
        duration_s: Duration of the load.
    """
    with ProcessMemoryMonitor(pid) as monitor:
        load = run_open_loop(url, bodies, LOAD_SHARE * sustained_rate, duration_s)
    early, late, p99 = monitor.median_of_fifth(1), monitor.median_of_fifth(4), load.quantile(0.99)
    rate = LOAD_SHARE * sustained_rate
    setting = f"soak, {len(load.latencies_s):,} requests, {rate:.1f} a second"
    num_lost = load.num_rejected + load.num_failed
    claims = [
        Claim(
            f"{setting}: memory within 10 %",
            f"{early:,.0f} and {late:,.0f} MB ({late / early:.2f})",
            abs(late / early - 1) <= 0.1,
        ),
        Claim(
            f"{setting}: p99 <= {p99_bound_s:g} s, all answered",
            f"{p99:.2f} s, {num_lost} not",
            not num_lost and p99 <= p99_bound_s,
        ),
    ]
    return {"load": load.as_json(), "memory, MB": monitor.samples_mb}, claims


class ProcessMemoryMonitor:
    """Samples the private memory of a process and of its children during the context.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self.samples_mb: list[float] = []
        """Sum over the processes at each sample, MB."""
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
        """Returns the median of a fifth of the samples; the first has index 0."""
        return float(np.median(np.array_split(self.samples_mb, 5)[index]))

    def _run(self) -> None:
        while not self._stopped.wait(0.5):
            total = 0.0
            for process in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.Error):  # the process ended
                    total += get_private_bytes(process)
            self.samples_mb.append(total / MB)
