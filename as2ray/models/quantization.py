"""Fits the activation ranges that a ranker needs for int8: post-training static quantization."""

from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch

from as2ray.errors import EvaluationError
from as2ray.models.ranker import Ranker

MIN_PAIRS: Final = 100
"""Pairs that ranges are fitted on at least."""

MAX_PAIRS: Final = 500
"""Pairs that are drawn from a larger table."""


def fit_activation_ranges(ranker: Ranker, table: pa.Table, seed: int = 0) -> int:
    """Fits the ranges of the inputs of all products, by scoring pairs in fp32.

    The ranges are stored with the ranker. Where its `dtype` is `auto` and the CPU multiplies bytes
    natively, it ranks in int8 from then on.

    Args:
        ranker: The ranker; of an ensemble, all members.
        table: A candidates table of texts as they will be ranked. Labels are not read.
        seed: Seed of the draw of `MAX_PAIRS` pairs.

    Returns:
        Number of pairs that were scored.

    Raises:
        EvaluationError: There are less than `MIN_PAIRS` pairs, or the ranker's states are not
            finite.
    """
    if table.num_rows < MIN_PAIRS:
        raise EvaluationError(
            f"{table.num_rows} pairs are too few to fit the ranges of activations: at least "
            f"{MIN_PAIRS} are needed"
        )
    rows = np.sort(np.random.default_rng(seed).permutation(table.num_rows)[:MAX_PAIRS])
    pairs = table.select(["question", "candidate"]).take(pa.array(rows))
    for member in getattr(ranker, "members", [ranker]):
        _fit(member, pairs["question"].to_pylist(), pairs["candidate"].to_pylist())
    return len(rows)


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
