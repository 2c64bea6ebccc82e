"""Pairwise margin loss (Mokrii et al. 2021, section 4): L = max(0, margin - (s+ - s-)).

Knows logits, labels and which sequences are a pair. Must not know models or how pairs are drawn.

s is the logit of a question's answer and of another of its candidates; with two logits, what the
positive one has over the other. With a pointwise ranker this is the paper's monoBERT.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from as2ray.errors import ConfigError, TrainingError
from as2ray.losses.base import StepContext, StepLoss
from as2ray.tables.schema import LIST_INDEX


@dataclass(frozen=True)
class MarginRankingLoss:
    """The loss of one positive and one negative a question and epoch."""

    list_size: ClassVar[int] = 2
    """Of a list."""
    margin: float = 1.0
    """How far an answer must stand above another candidate."""

    def __post_init__(self) -> None:
        if not self.margin > 0:
            raise ConfigError(
                f"margin {self.margin}; expected a number above 0",
            )

    def for_step(self, context: StepContext) -> StepLoss:
        """The same loss at every step."""
        return StepLoss(self.loss, {})

    def loss(self, logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Summed over the pairs of the batch; the loop divides by the pairs of the step.

        Args:
            logits: Shape [sequences, 1 or 2].
            targets: `label` [sequences], 0 or 1, and `list` [sequences]: each number twice, once
                with either label; `row`, below 0 in a batch that only keeps workers in step.
        """
        score = compute_list_scores(logits, targets)
        if targets["row"][0] < 0:
            return score.sum() * 0.0
        answer = targets["label"] > 0
        # Numbers of pairs bring the two sides into one order.
        ours, others = (
            score[side][targets[LIST_INDEX][side].argsort()] for side in (answer, ~answer)
        )
        return torch.clamp_min(self.margin - (ours - others), 0.0).sum()


def compute_list_scores(logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """What orders the candidates of lists, shape [sequences], fp32.

    Args:
        logits: Shape [sequences, 1 or 2].
        targets: `list` [sequences], among others.

    Raises:
        TrainingError: Batches that are not of lists, or a ranker with several outputs.
    """
    if LIST_INDEX not in targets or logits.ndim != 2:
        raise TrainingError(
            f"batches with {sorted(targets)}, logits of shape {list(logits.shape)}"
            f"; expected {LIST_INDEX!r} of each sequence, and a ranker with one output",
            fix="train on a ListStream, and name no exits or heads",
        )
    logits = logits.float()
    return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
