"""What the adapters share: a checkpoint's ranking of whatever has a text.

Knows checkpoints and rankers. Must not know any framework.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from as2ray.checkpoints.loading import load
from as2ray.models.ranker import Dtype, Ranker
from as2ray.outputs import strictly_decreasing

RANKING_LOCK = Lock()
"""Frameworks call from several threads; a ranker is not made to be at work twice at a time."""

OptionalDropRatios = float | list[float] | None
"""Other drop ratios than the checkpoint's."""


@dataclass(frozen=True, slots=True)
class TextRank:
    """A text of the ranking, best first."""

    index: int
    """In what was given."""
    score: float
    """Below the one before it: frameworks sort by it."""
    exit_layer: int | None
    """Layer after which the score was taken; None of a ranker without exits."""


@lru_cache(maxsize=4)
def cached_ranker(model: str, dtype: Dtype = "auto") -> Ranker:
    """The ranker of a checkpoint, loaded once in a process."""
    return load(model, dtype=dtype)


def rank_texts(
    model: str,
    dtype: Dtype,
    question: str,
    texts: Sequence[str | None],
    top_k: int | None,
    drop_ratios: OptionalDropRatios = None,
) -> list[TextRank]:
    """The ranking of texts; those without a text have no place in it.

    Args:
        model: Checkpoint folder or hub id.
        precision: Number format of the matrix products.
        question: The question.
        texts: What frameworks hold; a document may be a picture.
        top_k: How many to return; all by default.
        drop: Other drop ratios than the checkpoint's.
    """
    held = [number for number, text in enumerate(texts) if text and text.strip()]
    if not held:
        return []
    candidates = [str(texts[number]) for number in held]
    with RANKING_LOCK:
        ranking = cached_ranker(model, dtype).rank(question, candidates, top_k, drop_ratios)
    return [
        TextRank(held[one.index], score, one.exit_layer)
        for one, score in zip(ranking, strictly_decreasing(one.score for one in ranking))
    ]
