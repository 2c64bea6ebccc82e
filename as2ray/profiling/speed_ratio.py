"""The ratio of two sides, measured in turns, so that a noisy machine disturbs both alike.

Knows callables. Must not know what they do.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Workload = Callable[[], float]
"""Does a fixed amount of work and returns its rate, in units a second."""


@dataclass(frozen=True)
class SpeedRatio:
    """How many times as fast one side is as another, over the repeats of one run."""

    rates: tuple[float, ...]
    """Rates of our side, in the order in which they were measured."""
    baseline_rates: tuple[float, ...]
    """Rates of the other side, each measured beside ours of the same place."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio of each pair of repeats."""
        return tuple(a / b for a, b in zip(self.rates, self.baseline_rates, strict=True))

    @property
    def median(self) -> float:
        """The ratio to be told."""
        return statistics.median(self.ratios)

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest ratio of a pair of repeats."""
        return min(self.ratios), max(self.ratios)

    def __str__(self) -> str:
        low, high = self.range
        return f"{self.median:.2f} ({low:.2f}..{high:.2f})"

    def as_json(self) -> dict[str, Any]:
        """Everything that was measured, and what follows from it."""
        low, high = self.range
        return {**asdict(self), "ratio": {"median": self.median, "min": low, "max": high}}


def measure_alternately(
    workload: Workload, baselines: Sequence[Workload], num_repeats: int, warm_up: bool = True
) -> tuple[SpeedRatio, ...]:
    """Measures ours, others[0], others[1], ... in turns, every second turn in the opposite order.

    What runs after a heavy side runs slower: with one order that would always be the same side.

    Args:
        ours: Our side.
        others: What it is compared with.
        repeats: Measurements of each side.
        warm_up: Whether a measurement of each side goes before and is thrown away; never where each
            is measured once.

    Returns:
        For each of the others how many times as fast ours is.
    """
    sides = [workload, *baselines]
    if warm_up and num_repeats > 1:
        for side in sides:
            side()
    rates = []
    for number in range(num_repeats):
        way = 1 if number % 2 == 0 else -1
        rates.append([side() for side in sides[::way]][::way])
    mine, *theirs = (tuple(column) for column in zip(*rates))
    return tuple(SpeedRatio(mine, column) for column in theirs)
