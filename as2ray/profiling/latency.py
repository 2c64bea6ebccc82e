"""Measures latency per pair and number of parameters of rankers (CERBERUS, Table 5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev

import pyarrow as pa

from as2ray.models.ensemble import EnsembleRanker
from as2ray.models.ranker import Ranker
from as2ray.profiling.speed_ratio import SpeedRatio, Workload, measure_alternately, measure_rate
from as2ray.tables.schema import question_indices


@dataclass(frozen=True)
class Latency:
    """Size and speed of a ranker."""

    num_parameters: int
    pairs_per_second: tuple[float, ...]
    """Pairs per second in each pass, from tokens to scores."""
    slowdown: SpeedRatio | None
    """Time relative to the first ranker's; None for the first ranker."""

    @property
    def latency_us(self) -> tuple[float, float]:
        """Mean and standard deviation of the time per pair over the passes, in microseconds."""
        times_us = [1e6 / rate for rate in self.pairs_per_second]
        return mean(times_us), stdev(times_us)


def measure_latencies(
    rankers: Mapping[str, Ranker],
    table: pa.Table,
    num_repeats: int = 5,
    batch_size: int | None = None,
) -> dict[str, Latency]:
    """Measures rankers alternately over the same pairs, without tokenization, as the paper does.

    Args:
        rankers: Rankers by name; the others are compared with the first.
        table: Candidates to rank.
        num_repeats: Passes of each ranker, 2 or more.
        batch_size: Pairs of a batch; by default batches are packed by tokens. A cascade drops
            candidates within a batch, without BM25, which reads texts.
    """
    workloads = [_make_workload(ranker, table, batch_size) for ranker in rankers.values()]
    # The first ranker is also its own baseline, so that a single ranker is measured too.
    ratios = measure_alternately(workloads[0], workloads, num_repeats)
    latencies: dict[str, Latency] = {}
    for (name, ranker), ratio in zip(rankers.items(), ratios):
        num_parameters = sum(weights.numel() for weights in ranker.parameters())
        slowdown = ratio if latencies else None
        latencies[name] = Latency(num_parameters, ratio.baseline_rates, slowdown)
    return latencies


def _make_workload(ranker: Ranker, table: pa.Table, batch_size: int | None) -> Workload:
    """Returns a function that scores the table; an ensemble's members run one after the other."""
    members = ranker.members if isinstance(ranker, EnsembleRanker) else [ranker]
    size = batch_size or table.num_rows
    parts = [table[start : start + size] for start in range(0, table.num_rows, size)]
    encoded = [
        (
            [member.tokenizer.encode(*_texts(part)) for member in members],
            question_indices(part),
        )
        for part in parts
    ]

    def predict() -> None:
        for sequences_by_member, question_index in encoded:
            for member, sequences in zip(members, sequences_by_member):
                member.predict_sequences(sequences, question_index)

    return partial(measure_rate, table.num_rows, predict)


def _texts(table: pa.Table) -> tuple[list[str], list[str]]:
    return table["question"].to_pylist(), table["candidate"].to_pylist()
