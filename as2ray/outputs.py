"""What rankers return: ranked candidates, ranked passages, short answers and joint outputs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """One candidate of a ranking, best first."""

    index: int
    """Position in the list of candidates that was given."""
    score: float
    """Probability that the candidate answers the question."""
    text: str
    """The candidate."""
    exit_layer: int | None = None
    """Layer after which the score was taken; None of a ranker without exits."""


def strictly_decreasing(scores: Iterable[float]) -> list[float]:
    """Scores of a ranking, best first, each below the one before it, in float32 too.

    A candidate that fell early can have a higher score than a survivor, and others have equal
    ones. Whoever sorts by these, from whatever order, gets the ranking all the same.
    """
    found: list[float] = []
    for score in scores:
        if found:
            score = min(score, float(np.nextafter(np.float32(found[-1]), np.float32(-np.inf))))
        found.append(score)
    return found


@dataclass(frozen=True, slots=True)
class RankedPassage:
    """One passage of a ranking, best first, with the sentences selected in it."""

    index: int
    """Position in the list of passages that was given."""
    score: float
    """Higher is more relevant; around -1 to 1."""
    sentences: tuple[RankedCandidate, ...]
    """The selected ones, best first; their indices count inside the passage."""


@dataclass(frozen=True, slots=True)
class ShortAnswer:
    """A short answer, cut out of a sentence."""

    text: str
    """Its characters."""
    score: float
    """Sum of the logits of its first and last token: the higher, the surer."""
    passage_index: int
    """Position of its passage in the list that was given."""
    sentence_index: int
    """Position of its sentence in that passage."""


class PassageOutput(NamedTuple):
    """What a joint model says of passages (or windows of them) and of the sentences in them."""

    passage_scores: Tensor
    """Score of each passage, shape [passages]."""
    sentence_scores: Tensor
    """Score of each sentence, shape [sentences]."""
    passage_states: Tensor
    """State that stands for each passage, shape [passages, hidden]."""
    sentence_states: Tensor
    """State that stands for each sentence, shape [sentences, hidden]."""
    span_logits: Tensor | None = None
    """Logits of being an answer's first and last token, shape [tokens, 2]; None of a model that
    gives no answers."""
    token_passage: Tensor | None = None
    """Number of each token's passage, shape [tokens]; None where `answer` is."""
