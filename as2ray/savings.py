"""What a ranker's dropping saves over a table, three ways side by side.

Knows rankers of several stages, counted cost and a clock. Must not know files.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from as2ray.errors import RecipeError
from as2ray.evaluation.cost import Shape, layer_cost, operations
from as2ray.evaluation.ratio import Ratio, alternate
from as2ray.models.ranker import Ranker
from as2ray.models.sequential import SequentialRanker
from as2ray.models.staged import StagedRanker
from as2ray.pruning import Drop, drop_ratios


@dataclass(frozen=True)
class Savings:
    """Cost as a part of the whole encoder's over every pair."""

    drop: tuple[float, ...]
    """Drop ratio after each stage but the last."""
    layers: float
    """By the paper's formula."""
    operations: float
    """Floating-point operations, with heads, rounding and the pairs' own lengths."""
    time: Ratio
    """How many times as fast with dropping as without, both from text to ranking."""


def savings(ranker: Ranker, table: pa.Table, drop: Drop | None = None, repeats: int = 3) -> Savings:
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
    if repeats < 1:
        raise RecipeError(
            f"repeats={repeats}", expected="1 pass or more", mend="leave it out, for 3"
        )
    if not isinstance(ranker, StagedRanker):
        raise RecipeError(
            f"a {type(ranker).__name__}",
            expected="a ranker of several stages: a cascade or a sequential ranker",
            mend="name such a checkpoint",
        )
    ratios = drop_ratios(ranker.drop if drop is None else drop, len(ranker.exits))
    sequential = isinstance(ranker, SequentialRanker)
    stage = ranker.score_table(table, drop).stage
    assert stage is not None  # of a ranker of several stages
    texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
    tokens = ranker.tokenizer.encode(*texts).lengths.astype(np.float64)
    shape = Shape.of(ranker.network.config)
    left = [tokens[stage >= number] for number in range(len(ranker.exits))]
    everything = operations(shape, [shape.layers], [tokens], sequential=True)

    def whole() -> None:
        ranker.score(ranker.pack(ranker.tokenizer.encode(*texts)), table.num_rows)

    def dropping() -> None:
        ranker.score_table(table, drop)

    (timed,) = alternate(partial(_rate, dropping), [partial(_rate, whole)], repeats)
    return Savings(
        tuple(ratios.tolist()),
        layer_cost(ranker.exits, ratios, shape.layers, sequential, shape.heads * shape.head_layers),
        operations(shape, ranker.exits, left, sequential) / everything,
        timed,
    )


def _rate(work: Callable[[], None]) -> float:
    """How often a second the work is done."""
    began = time.perf_counter()
    work()
    return 1.0 / (time.perf_counter() - began)
