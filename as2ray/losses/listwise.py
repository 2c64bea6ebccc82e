"""Listwise cross entropy (ListNet's top-one form: Cao et al. 2007, section 4): over the list of a
question's candidates, L = - sum of y_i log softmax(s)_i, y the labels divided by their sum.

Knows logits, labels and which sequences are a list. Must not know models or how lists are drawn.

s is a candidate's logit; with two logits, what the positive one has over the other. Scores of one
question are compared with each other alone: they order its candidates and are no probabilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from as2ray.errors import ConfigError
from as2ray.losses.base import StepContext, StepLoss
from as2ray.losses.pairwise import LIST_INDEX, compute_list_scores


@dataclass(frozen=True)
class ListwiseLoss:
    """The loss of one list a question and epoch."""

    list_size: int = 16
    """Most candidates of a list: as far as there are any, half positives, half negatives."""

    def __post_init__(self) -> None:
        if self.list_size < 2:
            raise ConfigError(
                f"lists of {self.list_size} candidates; expected 2 or more",
            )

    def for_step(self, context: StepContext) -> StepLoss:
        """The same loss at every step."""
        return StepLoss(self.loss, {})

    def loss(self, logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Summed over the lists of the batch; the loop divides by the lists of the step.

        Args:
            logits: Shape [sequences, 1 or 2].
            targets: `label` [sequences], 0 or 1, and `list` [sequences]: a number for each list,
                which holds both labels; `row`, below 0 in a batch that only keeps workers in step.
        """
        score = compute_list_scores(logits, targets)
        if targets["row"][0] < 0:
            return score.sum() * 0.0
        found, of = targets[LIST_INDEX].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        nothing = torch.zeros(len(found), device=score.device)
        highest = nothing.scatter_reduce(0, of, score.detach(), "amax", include_self=False)
        sums = nothing.index_add(0, of, (score - highest[of]).exp())
        label = targets["label"].float()
        weight = label / nothing.index_add(0, of, label)[of]
        return (weight * ((sums.log() + highest)[of] - score)).sum()
