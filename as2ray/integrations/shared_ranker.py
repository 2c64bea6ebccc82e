"""Ranks texts with a checkpoint that is loaded once per process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Annotated

from pydantic import BeforeValidator

from as2ray.checkpoints.loading import load
from as2ray.models.precision import Dtype
from as2ray.models.ranker import Ranker
from as2ray.outputs import strictly_decreasing

RANKING_LOCK = Lock()
"""Frameworks call from several threads, but a ranker must not rank in two threads at a time."""

ModelPath = Annotated[
    str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)
]
"""Checkpoint folder or hub id; the `Path` of a folder becomes a string."""

OptionalDropRatios = float | list[float] | None
"""Drop ratios of a cascade; None for the checkpoint's."""


@dataclass(frozen=True, slots=True)
class TextRank:
    """A text of the ranking, best first."""

    index: int
    """Position in the list of texts."""
    score: float
    """Score; each is below the one before it, because frameworks sort by it."""
    exit_layer: int | None
    """Layer of the exit that scored the text; None of a ranker without exits."""


@lru_cache(maxsize=4)
def cached_ranker(model: str, dtype: Dtype = "auto") -> Ranker:
    """Returns the ranker of a checkpoint, loaded once per process."""
    return load(model, dtype=dtype)


def rank_texts(
    model: str,
    dtype: Dtype,
    question: str,
    texts: Sequence[str | None],
    top_k: int | None,
    drop_ratios: OptionalDropRatios = None,
) -> list[TextRank]:
    """Ranks texts; empty ones and documents without a text, such as pictures, are left out.

    Args:
        model: Checkpoint folder or hub id.
        dtype: Number format of matrix products.
        question: The question.
        texts: The texts; None for a document without a text.
        top_k: Number of texts to return; by default all.
        drop_ratios: Drop ratios of a cascade; by default the checkpoint's.
    """
    indices = [index for index, text in enumerate(texts) if text and text.strip()]
    if not indices:
        return []
    candidates = [str(texts[index]) for index in indices]
    with RANKING_LOCK:
        ranking = cached_ranker(model, dtype).rank(question, candidates, top_k, drop_ratios)
    scores = strictly_decreasing(candidate.score for candidate in ranking)
    return [
        TextRank(indices[candidate.index], score, candidate.exit_layer)
        for candidate, score in zip(ranking, scores)
    ]
