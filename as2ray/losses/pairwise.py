"""Pairwise margin loss (Mokrii et al. 2021, section 4): L = max(0, margin - (s+ - s-)).

s+ and s- are the scores of a positive and a negative candidate of one question. The score is the
logit; with two logits, their difference. With a pointwise ranker this is the paper's monoBERT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ConfigDict, PositiveFloat
from pydantic.dataclasses import dataclass

from as2ray.errors import TrainingError
from as2ray.losses.base import Loss, StepContext, Targets
from as2ray.tables.schema import LIST_INDEX

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MarginRankingLoss(Loss):
    """Margin loss over one positive and one negative candidate per question and epoch."""

    list_size: ClassVar[int] = 2
    """Candidates of a list."""
    margin: PositiveFloat = 1.0
    """Difference of scores above which a pair has no loss."""
    type: Literal["margin_ranking"] = "margin_ranking"
    """Name of the loss."""

    def compute(self, output: Tensor, targets: Targets, context: StepContext) -> Tensor:
        """Computes the loss summed over the pairs of the batch.

        Args:
            output: Logits, shape [sequences, 1 or 2].
            targets: `label` [sequences], 0 or 1; `list` [sequences], each number twice, once with
                either label; `row` [sequences], negative in a placeholder batch, whose loss is 0.
            context: The step; not used.
        """
        scores = compute_list_scores(output, targets)
        if targets["row"][0] < 0:
            return scores.sum() * 0.0
        is_positive = targets["label"] > 0
        # Sorting by the number of the pair aligns positives and negatives.
        positive_scores = scores[is_positive][targets[LIST_INDEX][is_positive].argsort()]
        negative_scores = scores[~is_positive][targets[LIST_INDEX][~is_positive].argsort()]
        return (self.margin - (positive_scores - negative_scores)).clamp_min(0.0).sum()


def compute_list_scores(logits: Tensor, targets: Targets) -> Tensor:
    """Computes the scores that order the candidates of lists, shape [sequences], float32.

    Args:
        logits: Shape [sequences, 1 or 2].
        targets: `list` [sequences], among others.

    Raises:
        TrainingError: Batches without lists, or a ranker with several outputs.
    """
    if LIST_INDEX not in targets or logits.ndim != 2:
        raise TrainingError(
            f"batches with {sorted(targets)} and logits of shape {list(logits.shape)}; this loss "
            f"needs {LIST_INDEX!r} of each sequence and a ranker with one output",
            fix="read the data with a ListReader, and train a ranker without exits and heads",
        )
    logits = logits.float()
    return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
