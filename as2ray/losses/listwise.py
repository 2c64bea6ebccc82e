"""Listwise cross entropy (ListNet's top-one form: Cao et al. 2007, section 4).

Over the list of a question's candidates, L = - sum of y_i log softmax(s)_i, where y are the labels
divided by their sum. The score s is the logit; with two logits, their difference. Scores are only
comparable within a question: they order its candidates and are no probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from as2ray.losses.base import Loss, StepContext, Targets
from as2ray.losses.pairwise import compute_list_scores
from as2ray.tables.schema import LIST_INDEX

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ListwiseLoss(Loss):
    """Cross entropy over one list per question and epoch."""

    list_size: Annotated[int, Field(ge=2)] = 16
    """Maximum number of candidates of a list, half of them positive if there are enough."""
    type: Literal["listwise_cross_entropy"] = "listwise_cross_entropy"
    """Name of the loss."""

    def compute(self, output: Tensor, targets: Targets, context: StepContext) -> Tensor:
        """Computes the loss summed over the lists of the batch.

        Args:
            output: Logits, shape [sequences, 1 or 2].
            targets: `label` [sequences], 0 or 1; `list` [sequences], a number for each list, which
                contains both labels; `row` [sequences], negative in a placeholder batch, whose
                loss is 0.
            context: The step; not used.
        """
        import torch

        scores = compute_list_scores(output, targets)
        if targets["row"][0] < 0:
            return scores.sum() * 0.0
        lists, list_index = targets[LIST_INDEX].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        zeros = torch.zeros(len(lists), device=scores.device)
        max_score = zeros.scatter_reduce(0, list_index, scores.detach(), "amax", include_self=False)
        sums = zeros.index_add(0, list_index, (scores - max_score[list_index]).exp())
        label = targets["label"].float()
        weights = label / zeros.index_add(0, list_index, label)[list_index]
        return (weights * ((sums.log() + max_score)[list_index] - scores)).sum()
