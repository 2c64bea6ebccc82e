"""Speed ratio of two workloads, measured alternately so that noise affects both equally."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Workload = Callable[[], float]
"""Does a fixed amount of work and returns its rate, in units per second."""


@dataclass(frozen=True)
class SpeedRatio:
    """Ratio of the rates of a workload and a baseline, over several repeats."""

    rates: tuple[float, ...]
    """Rates of the workload, in the order of measurement."""
    baseline_rates: tuple[float, ...]
    """Rates of the baseline, each measured next to the rate of the same index."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ratio of each pair of rates."""
        return tuple(a / b for a, b in zip(self.rates, self.baseline_rates, strict=True))

    @property
    def median(self) -> float:
        """Median ratio, which is the result to report."""
        return statistics.median(self.ratios)

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest ratio."""
        return min(self.ratios), max(self.ratios)

    def __str__(self) -> str:
        low, high = self.range
        return f"{self.median:.2f} ({low:.2f}..{high:.2f})"

    def as_json(self) -> dict[str, Any]:
        """Returns all rates and the ratio for JSON."""
        low, high = self.range
        return {**asdict(self), "ratio": {"median": self.median, "min": low, "max": high}}


def measure_rate(num_units: int, function: Callable[..., object], *args: object) -> float:
    """Returns the units per second of a function that processes `num_units`."""
    started_at = time.perf_counter()
    function(*args)
    return num_units / (time.perf_counter() - started_at)


def measure_alternately(
    workload: Workload, baselines: Sequence[Workload], num_repeats: int, warm_up: bool = True
) -> tuple[SpeedRatio, ...]:
    """Runs the workload and its baselines in turns, every second turn in reverse order.

    A workload runs slower after a heavy one. Without reversing, that would always be the same one.

    Args:
        workload: The workload of interest.
        baselines: Workloads with which it is compared.
        num_repeats: Measurements of each workload.
        warm_up: Whether each workload first runs once without being measured; ignored if
            `num_repeats` is 1.

    Returns:
        The speed ratio of the workload to each baseline.
    """
    workloads = [workload, *baselines]
    if warm_up and num_repeats > 1:
        for run in workloads:
            run()
    rates_by_turn = []
    for turn in range(num_repeats):
        direction = 1 if turn % 2 == 0 else -1
        rates_by_turn.append([run() for run in workloads[::direction]][::direction])
    rates, *baseline_rates = (tuple(column) for column in zip(*rates_by_turn))
    return tuple(SpeedRatio(rates, column) for column in baseline_rates)
