"""Return types of rankers: ranked candidates and passages, short answers, passage outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A candidate in a ranking."""

    index: int
    """Position in the list of candidates that was ranked."""
    score: float
    """Probability that the candidate answers the question, or its logit."""
    text: str
    """Text of the candidate."""
    exit_layer: int | None = None
    """Layer after which the score was taken; None for a ranker without exits."""
    is_logit: bool = False
    """Whether the score is a logit, as the checkpoint's `activation_fn` says."""


class Ranking(list[RankedCandidate]):
    """The ranked candidates of one question, best first."""

    budget_exceeded_ms: float | None = None
    """Milliseconds by which the ranking was late, 0 within its budget; None without a budget."""


def strictly_decreasing(scores: Iterable[float]) -> list[float]:
    """Lowers the scores of a ranking where needed, so that sorting by them gives the ranking.

    A candidate that was dropped early can have a higher score than one that was not, and scores
    can be equal.

    Args:
        scores: Scores of a ranking, best first.

    Returns:
        Scores in the same order, each below the previous one, also in float32.
    """
    lowered: list[float] = []
    for score in scores:
        if lowered:
            next_lower = np.nextafter(np.float32(lowered[-1]), np.float32(-np.inf))
            score = min(score, float(next_lower))
        lowered.append(score)
    return lowered


@dataclass(frozen=True, slots=True)
class RankedPassage:
    """A passage in a ranking, with the sentences that were selected in it."""

    index: int
    """Position in the list of passages that was ranked."""
    score: float
    """Higher is more relevant; around -1 to 1."""
    sentences: tuple[RankedCandidate, ...]
    """Selected sentences, best first; `index` is the position in the passage."""


@dataclass(frozen=True, slots=True)
class ShortAnswer:
    """A short answer: a span of a sentence."""

    text: str
    """Text of the span."""
    score: float
    """Sum of the logits of its first and last token; higher is more certain."""
    passage_index: int
    """Position of its passage in the list that was ranked."""
    sentence_index: int
    """Position of its sentence in the passage."""


def output_names(exit_layers: Sequence[int], num_outputs: int) -> list[str]:
    """Names the outputs of a ranker: `exit_4` after layer 4, and the heads after the last exit.

    Args:
        exit_layers: Layers below each exit that was run; empty for a ranker without exits.
        num_outputs: Outputs of these exits; those beyond one for each are of `head_1`, `head_2`...

    Returns:
        The names; [""] for the only output of a ranker without exits.
    """
    names = [f"exit_{layers}" for layers in exit_layers] or [""]
    num_heads = num_outputs - len(names) + 1
    return names if num_heads == 1 else [*names[:-1], *(f"head_{n + 1}" for n in range(num_heads))]


class PassageOutput(NamedTuple):
    """Output of a joint model for passages (or windows of passages) and their sentences."""

    passage_scores: "Tensor"
    """Score of each passage, shape [passages]."""
    sentence_scores: "Tensor"
    """Score of each sentence, shape [sentences]."""
    passage_states: "Tensor"
    """State of each passage, shape [passages, hidden_size]."""
    sentence_states: "Tensor"
    """State of each sentence, shape [sentences, hidden_size]."""
    span_logits: "Tensor | None" = None
    """Logits of the first and last token of an answer, shape [tokens, 2]; None for a model that
    extracts no answers."""
    token_passage: "Tensor | None" = None
    """Number of each token's passage, shape [tokens]; None if `span_logits` is None."""
