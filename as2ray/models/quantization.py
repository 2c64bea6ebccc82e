"""Fits the activation ranges that a ranker needs for int8: post-training static quantization.

Where int8 changes the scores too much, the parts of layers that change them most stay in bf16.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from scipy.special import logit

from as2ray.errors import EvaluationError
from as2ray.models.encoder.int8 import LAYER_PARTS, ActivationRanges
from as2ray.models.precision import has_int8
from as2ray.models.ranker import Ranker

MIN_PAIRS: Final = 100
"""Pairs that ranges are fitted on at least."""

MAX_PAIRS: Final = 2_000
"""Pairs that are drawn from a larger table."""

NUM_ERROR_PAIRS: Final = 100
"""Pairs whose scores in int8 are compared with those in fp32. Ranges are not fitted on them, unless
that would leave less than `MIN_PAIRS`."""

MAX_ERROR: Final = 0.1
"""Root mean square of the errors of log-odds, as a share of their standard deviation, up to which
all products are in int8. MiniLM has 0.01 to 0.03."""

MAX_UNQUANTIZED_SHARE: Final = 0.5
"""Share of the parts of layers that may stay in bf16: the more of them, the less int8 gains."""


def fit_activation_ranges(ranker: Ranker, table: pa.Table, seed: int = 0) -> int:
    """Fits the ranges of the inputs of all products, by scoring pairs in fp32.

    The ranges are stored with the ranker. Where its `dtype` is `auto` and the CPU multiplies bytes
    natively, it ranks in int8 from then on. On such a CPU some scores are compared with those in
    fp32, and parts of layers stay in bf16 until the errors are at most `MAX_ERROR`.

    Args:
        ranker: The ranker; of an ensemble, all members.
        table: A candidates table of texts as they will be ranked. Labels are not read.
        seed: Seed of the draw of `MAX_PAIRS` pairs.

    Returns:
        Number of pairs that the ranges were fitted on.

    Raises:
        EvaluationError: There are less than `MIN_PAIRS` pairs, or the ranker's states are not
            finite.
    """
    if table.num_rows < MIN_PAIRS:
        raise EvaluationError(
            f"{table.num_rows} pairs are too few to fit the ranges of activations: at least "
            f"{MIN_PAIRS} are needed"
        )
    rows = np.random.default_rng(seed).permutation(table.num_rows)
    num_others = NUM_ERROR_PAIRS if len(rows) >= MIN_PAIRS + NUM_ERROR_PAIRS else 0
    num_fitting = min(MAX_PAIRS, len(rows) - num_others)
    fitting, others = (
        [column.to_pylist() for column in table.select(["question", "candidate"]).take(part)]
        for part in (pa.array(np.sort(rows[:num_fitting])), pa.array(rows[-NUM_ERROR_PAIRS:]))
    )
    for member in getattr(ranker, "members", [ranker]):
        _fit(member, *fitting)
        if has_int8(ranker.device):
            _keep_sensitive_parts(member, *others)
    return len(fitting[0])


def _fit(ranker: Any, questions: list[str], candidates: list[str]) -> None:
    names = ("dtype", "use_fused_layers", "allow_parallel")
    settings = {name: getattr(ranker, name) for name in names}
    # One thread, because the ranges are updated without a lock.
    ranker.dtype, ranker.use_fused_layers, ranker.allow_parallel = "fp32", True, False
    try:
        with ExitStack() as stack:
            observed = [stack.enter_context(part.observe_ranges()) for part in ranker.encoders]
            ranker.predict_exits(questions, candidates)
            ranges = tuple(fused.observed_ranges() for fused in observed)
    finally:
        for name, value in settings.items():
            setattr(ranker, name, value)
    tensors = [part for entry in ranges for layer in entry.layers for part in layer.values()]
    if not all(bool(torch.isfinite(part).all()) for part in tensors):
        raise EvaluationError("the ranker's states are not finite, so they have no ranges")
    ranker.activation_ranges = ranges


def _keep_sensitive_parts(ranker: Any, questions: list[str], candidates: list[str]) -> None:
    """Leaves those parts of layers in bf16 that change the scores most, one after the other."""
    fitted: tuple[ActivationRanges, ...] = ranker.activation_ranges
    dtype, fused = ranker.dtype, ranker.use_fused_layers
    parts = [
        (encoder, layer, part)
        for encoder, ranges in enumerate(fitted)
        for layer in range(len(ranges.layers))
        for part in LAYER_PARTS
    ]

    def log_odds(unquantized: Collection[tuple[int, int, str]]) -> np.ndarray:
        ranker.activation_ranges = tuple(
            replace(ranges, unquantized_parts=frozenset(x[1:] for x in unquantized if x[0] == i))
            for i, ranges in enumerate(fitted)
        )
        scores: np.ndarray = ranker.predict_exits(questions, candidates)
        return np.asarray(logit(scores.clip(1e-6, 1 - 1e-6)))

    def error(unquantized: Collection[tuple[int, int, str]]) -> float:
        errors = np.sqrt(np.mean((log_odds(unquantized) - exact) ** 2, axis=0))
        return float(np.max(errors / np.maximum(exact.std(0), 1e-6)))

    try:
        ranker.use_fused_layers, ranker.dtype = True, "fp32"
        exact = log_odds(())
        ranker.dtype = "int8"
        kept: list[tuple[int, int, str]] = []
        if error(kept) > MAX_ERROR:
            alone = {part: error([x for x in parts if x != part]) for part in parts}
            order = sorted(parts, key=lambda part: -alone[part])
            for part in order[: int(MAX_UNQUANTIZED_SHARE * len(parts))]:
                kept.append(part)
                if error(kept) <= MAX_ERROR:
                    break
    except BaseException:
        ranker.activation_ranges = fitted
        raise
    finally:
        ranker.dtype, ranker.use_fused_layers = dtype, fused
