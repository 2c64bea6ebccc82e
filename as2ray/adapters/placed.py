"""What the adapters share: a checkpoint's ranking of whatever has a text.

Knows checkpoints and rankers. Must not know any framework.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from as2ray.checkpoint import load
from as2ray.models.ranker import Precision, Ranker
from as2ray.records import falling

RANKING = Lock()
"""Frameworks call from several threads; a ranker is not made to be at work twice at a time."""

Drop = float | list[float] | None
"""Other drop ratios than the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A text of the ranking, best first."""

    index: int
    """In what was given."""
    score: float
    """Below the one before it: frameworks sort by it."""
    exit_layer: int | None
    """Layer after which the score was taken; None of a ranker without exits."""


@lru_cache(maxsize=4)
def ranker_of(model: str, precision: Precision = "auto") -> Ranker:
    """The ranker of a checkpoint, loaded once in a process."""
    return load(model, precision=precision)


def place(
    model: str,
    precision: Precision,
    question: str,
    texts: Sequence[str | None],
    top_k: int | None,
    drop: Drop = None,
) -> list[Placed]:
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
    with RANKING:
        ranking = ranker_of(model, precision).rank(question, candidates, top_k, drop)
    return [
        Placed(held[one.index], score, one.exit_layer)
        for one, score in zip(ranking, falling(one.score for one in ranking))
    ]
