"""What a ranker's dropping saves over a table, three ways side by side.

Knows rankers of several stages, counted cost and a clock. Must not know files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from as2ray.cascade.cost import EncoderShape, count_flops, relative_layers
from as2ray.cascade.pruning import DropRatios, expand_drop_ratios
from as2ray.errors import ConfigError
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.ranker import Ranker
from as2ray.models.sequential import SequentialRanker
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately


@dataclass(frozen=True)
class Savings:
    """Cost as a part of the whole encoder's over every pair."""

    drop_ratios: tuple[float, ...]
    """Drop ratio after each stage but the last."""
    relative_layers: float
    """By the paper's formula."""
    relative_flops: float
    """Floating-point operations, with heads, rounding and the pairs' own lengths."""
    speedup: SpeedRatio
    """How many times as fast with dropping as without, both from text to ranking."""


def measure_savings(
    ranker: Ranker, table: pa.Table, drop_ratios: DropRatios | None = None, num_repeats: int = 3
) -> Savings:
    """Measures what dropping saves.

    For a sequential ranker nothing dropped is its deepest ranker alone.

    Args:
        ranker: A cascade or a sequential ranker.
        table: Candidates to rank.
        drop: Other drop ratios than the ranker's own.
        repeats: Passes with and without dropping, in turns.

    Raises:
        RecipeError: A ranker of one stage, or no pass at all.
    """
    if num_repeats < 1:
        raise ConfigError(
            f"repeats={num_repeats}; expected 1 pass or more",
            fix="leave it out, for 3",
        )
    if not isinstance(ranker, MultiStageRanker):
        raise ConfigError(
            f"a {type(ranker).__name__}"
            "; expected a ranker of several stages: a cascade or a sequential ranker",
            fix="name such a checkpoint",
        )
    ratios = expand_drop_ratios(
        ranker.drop_ratios if drop_ratios is None else drop_ratios, len(ranker.exit_layers)
    )
    sequential = isinstance(ranker, SequentialRanker)
    stage = ranker.predict_table(table, drop_ratios).stage_index
    assert stage is not None  # of a ranker of several stages
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    tokens = ranker.tokenizer.encode(*texts).lengths.astype(np.float64)
    shape = EncoderShape.from_config(ranker.network.config)
    left = [tokens[stage >= number] for number in range(len(ranker.exit_layers))]
    everything = count_flops(shape, [shape.num_layers], [tokens], sequential=True)

    def whole() -> None:
        ranker.predict_scores(ranker.pack(ranker.tokenizer.encode(*texts)), table.num_rows)

    def dropping() -> None:
        ranker.predict_table(table, drop_ratios)

    (timed,) = measure_alternately(
        partial(_measure_rate, dropping), [partial(_measure_rate, whole)], num_repeats
    )
    return Savings(
        tuple(ratios.tolist()),
        relative_layers(
            ranker.exit_layers,
            ratios,
            shape.num_layers,
            sequential,
            shape.num_ranking_heads * shape.layers_per_head,
        ),
        count_flops(shape, ranker.exit_layers, left, sequential) / everything,
        timed,
    )


def _measure_rate(function: Callable[[], None]) -> float:
    """How often a second the work is done."""
    began = time.perf_counter()
    function()
    return 1.0 / (time.perf_counter() - began)
