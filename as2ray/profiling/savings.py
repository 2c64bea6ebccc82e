"""Measures what dropping candidates saves over a table: in layers, in FLOPs and in time."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from as2ray.cascade.cost import EncoderShape, measure_relative_cost, observed_drop_ratios
from as2ray.cascade.pruning import DropRatios
from as2ray.errors import ConfigError
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.ranker import Ranker
from as2ray.models.sequential import SequentialRanker
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately, measure_rate


@dataclass(frozen=True)
class Savings:
    """Cost of a ranker that drops candidates, relative to the whole encoder over all pairs."""

    drop_ratios: tuple[float, ...]
    """Drop ratio after each stage but the last; with margins, which share was dropped."""
    relative_layers: float
    """Relative number of layers, by the paper's formula."""
    relative_flops: float
    """Relative FLOPs, with heads, rounding and the lengths of the pairs."""
    speedup: SpeedRatio
    """Speed with dropping relative to that without, from text to ranking."""


def measure_savings(
    ranker: Ranker, table: pa.Table, drop_ratios: DropRatios | None = None, num_repeats: int = 3
) -> Savings:
    """Measures what dropping saves.

    A sequential ranker without dropping runs only its deepest ranker.

    Args:
        ranker: A cascade or a sequential ranker.
        table: Candidates to rank.
        drop_ratios: Drop ratios to use instead of the ranker's own drop ratios or margins.
        num_repeats: Passes with and without dropping, 1 or more.

    Raises:
        ConfigError: A ranker with a single stage, or invalid drop ratios.
    """
    if not isinstance(ranker, MultiStageRanker):
        problem = f"a {type(ranker).__name__} drops no candidates"
        raise ConfigError(problem, fix="use a cascade or a sequential ranker")
    is_sequential = isinstance(ranker, SequentialRanker)
    stage_index = ranker.predict_table(table, drop_ratios).stage_index
    assert stage_index is not None  # set by rankers with several stages
    pruning = ranker.resolve_pruning(drop_ratios, 1)
    by_margins = bool(np.isfinite(pruning.margins).any())
    observed = observed_drop_ratios(stage_index, len(ranker.exit_layers))
    ratios = observed if by_margins else pruning.drop_ratios[0]
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    lengths = ranker.tokenizer.encode(*texts).lengths
    shape = EncoderShape.from_config(ranker.network.config)
    layers, flops = measure_relative_cost(
        shape, ranker.exit_layers, ratios, lengths, stage_index, is_sequential
    )

    def rank_without_dropping() -> None:
        ranker.predict_scores(ranker.pack(ranker.tokenizer.encode(*texts)), table.num_rows)

    (speedup,) = measure_alternately(
        partial(measure_rate, 1, ranker.predict_table, table, drop_ratios),
        [partial(measure_rate, 1, rank_without_dropping)],
        num_repeats,
    )
    return Savings(tuple(ratios.tolist()), layers, flops, speedup)
