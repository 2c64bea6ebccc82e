"""A soak: our service at 80 % of the rate that it sustains, for ten minutes, and its memory.

Knows the service as processes, and its clients. Must not know how it answers.

Memory is that of every process of the service, without shared pages, summed and looked at once a
second. What is claimed is that it lies flat: the median of the last fifth of the time is within a
tenth of that of the second fifth. The first fifth is the service growing into its load.
"""

import argparse
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import psutil

from benchmarks.load import open_loop
from benchmarks.memory import MB, private
from benchmarks.ranking import by_question, questions_of, squad_table
from benchmarks.report import Claim, arguments, finish, hold_to_cores
from benchmarks.serving import FULL, SMALL, common, highest, ours, requests_of, served

LOAD = 0.8
"""Part of the sustained rate."""

LONG = 600.0
"""Seconds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = arguments(__doc__, argv, _more)
    size = SMALL if args.small else FULL
    hold_to_cores(args.cores)
    candidates, bound = next(iter(size.bounds.items()))
    table = squad_table(args.data, args.small)
    bodies = requests_of(by_question(questions_of(table, candidates, size.questions)))
    with served(ours(args), args.start) as service:
        rate = LOAD * highest(service.url, bodies, bound, size.seconds)
        with Followed(service.pid, 0.1 if args.small else 1.0) as memory:
            load = open_loop(service.url, bodies, rate, 5.0 if args.small else args.seconds)
    early, late = memory.fifth(1), memory.fifth(4)
    p99 = load.quantile(0.99)
    told = f"{len(load.seconds):,} requests of {candidates} candidates, {rate:.1f} a second"
    results: dict[str, Any] = {
        "rate": rate,
        "load": load.as_json(),
        "memory": {"seen": memory.seen, "second fifth": early, "last fifth": late},
    }
    claims = [
        Claim(
            f"{told}: memory within 10 %",
            f"{early:,.0f} and {late:,.0f} MB ({late / early:.2f})",
            abs(late / early - 1) <= 0.1,
        ),
        Claim(f"{told}: p99 <= {bound:g} s", f"{p99:.2f} s", p99 <= bound),
        Claim(
            f"{told}: none refused or failed",
            f"{load.refused} and {load.failed}",
            not load.refused and not load.failed,
        ),
    ]
    finish("soak", args, claims, results)


def _more(parser: argparse.ArgumentParser) -> None:
    common(parser)
    parser.add_argument("--seconds", type=float, default=LONG, help="how long the load lasts")


class Followed:
    """The private memory of a process and of all that it started, while a load lasts.

    Args:
        pid: The process.
        every: Seconds from one look to the next.
    """

    def __init__(self, pid: int, every: float) -> None:
        self.seen: list[float] = []
        """Sum over the processes at each look, MB."""
        self._process, self._every = psutil.Process(pid), every
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
        while not self._over.wait(self._every):
            total = 0.0
            for process in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.Error):  # it ended
                    total += private(process)
            self.seen.append(total / MB)


if __name__ == "__main__":
    main()
