"""Pairwise margin loss (Mokrii et al. 2021, section 4): L = max(0, margin - (s+ - s-)).

Knows logits, labels and which sequences are a pair. Must not know models or how pairs are drawn.

s is the logit of a question's answer and of another of its candidates; with two logits, what the
positive one has over the other. With a pointwise ranker this is the paper's monoBERT.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from as2ray.errors import RecipeError, TrainingError
from as2ray.objectives.base import Moment, Task

PAIR = "pair"
"""What belongs to each sequence: the number of its pair."""


@dataclass(frozen=True)
class Margin:
    """The loss of one positive and one negative a question and epoch."""

    margin: float = 1.0
    """How far an answer must stand above another candidate."""

    def __post_init__(self) -> None:
        if not self.margin > 0:
            raise RecipeError(
                f"margin {self.margin}", expected="a number above 0", mend="correct the recipe"
            )

    def at(self, moment: Moment) -> Task:
        """The same loss at every step."""
        return Task(self.loss, {})

    def loss(self, logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Summed over the pairs of the batch; the loop divides by the pairs of the step.

        Args:
            logits: Shape [sequences, 1 or 2].
            targets: `label` [sequences], 0 or 1, and `pair` [sequences]: each number twice, once
                with either label; `row`, below 0 in a batch that only keeps workers in step.
        """
        if PAIR not in targets or logits.ndim != 2:
            raise TrainingError(
                f"batches with {sorted(targets)}, logits of shape {list(logits.shape)}",
                expected=f"{PAIR!r} of each sequence, and a ranker with one output",
                mend="train on a PairedStream, and name no exits or heads",
            )
        score = logits.float()
        score = score[:, 1] - score[:, 0] if score.shape[1] == 2 else score[:, 0]
        if targets["row"][0] < 0:
            return score.sum() * 0.0
        answer = targets["label"] > 0
        # Numbers of pairs bring the two sides into one order.
        ours, others = (score[side][targets[PAIR][side].argsort()] for side in (answer, ~answer))
        return torch.clamp_min(self.margin - (ours - others), 0.0).sum()
