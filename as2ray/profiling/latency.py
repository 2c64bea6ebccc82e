"""How long rankers take for a pair, side by side, beside their size (CERBERUS, Table 5).

Knows rankers and a clock. Must not know files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from time import perf_counter

import pyarrow as pa

from as2ray.models.ensemble import EnsembleRanker
from as2ray.models.ranker import Ranker
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.tables.schema import question_indices


@dataclass(frozen=True)
class Latency:
    """A ranker's size and what a pair costs it."""

    num_parameters: int
    pairs_per_second: tuple[float, ...]
    """Pairs a second in each pass, from tokens to scores."""
    slowdown: SpeedRatio | None
    """How many times the first ranker's time it takes; of the first none."""

    @property
    def latency_us(self) -> tuple[float, float]:
        """A pair's mean and standard deviation over the passes."""
        times = [1e6 / rate for rate in self.pairs_per_second]
        return mean(times), stdev(times)


def measure_latencies(
    rankers: Mapping[str, Ranker], table: pa.Table, num_repeats: int = 5
) -> dict[str, Latency]:
    """Measures rankers in turns over the same pairs; tokenising is left out, as in the paper.

    Args:
        rankers: By name; the others are compared with the first.
        table: Candidates to rank.
        repeats: Passes of each, 2 or more.
    """
    sides = [_make_workload(ranker, table) for ranker in rankers.values()]
    # With itself too: a single ranker has a time all the same.
    own, *others = measure_alternately(sides[0], sides, num_repeats)
    slower = [None, *others]
    return {
        name: Latency(sum(p.numel() for p in ranker.parameters()), ratio.baseline_rates, against)
        for (name, ranker), ratio, against in zip(rankers.items(), [own, *others], slower)
    }


def _make_workload(ranker: Ranker, table: pa.Table) -> Callable[[], float]:
    """An ensemble's members one after the other, any other ranker as one."""
    members = ranker.members if isinstance(ranker, EnsembleRanker) else [ranker]
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    encoded = [member.tokenizer.encode(*texts) for member in members]
    question = question_indices(table)
    works = [partial(m.predict_sequences, own, question) for m, own in zip(members, encoded)]

    def side() -> float:
        began = perf_counter()
        for work in works:
            work()
        return float(table.num_rows / (perf_counter() - began))

    return side
