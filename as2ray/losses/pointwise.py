"""Pointwise cross entropy (TANDA, section 3.2): L = - sum over labels of y log softmax(W x + b)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from as2ray.errors import TrainingError
from as2ray.losses.base import Loss, StepContext, Targets

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropyLoss(Loss):
    """Cross entropy of each pair of a question and a candidate."""

    def compute(self, output: Tensor, targets: Targets, context: StepContext) -> Tensor:
        """Computes `cross_entropy`, the same at every step."""
        return cross_entropy(output, targets)


def cross_entropy(logits: Tensor, targets: Targets) -> Tensor:
    """Computes the cross entropy summed over the batch.

    Args:
        logits: Shape [sequences, 2], or [sequences, 1] for a binary logit.
        targets: `label`, 0 or 1, and possibly `weight`, shape [sequences].

    Raises:
        TrainingError: Logits of several exits or heads.
    """
    from torch.nn import functional

    if logits.ndim != 2:
        problem = f"logits of shape {list(logits.shape)}; this loss needs [sequences, 1 or 2]"
        raise TrainingError(problem, fix="use a loss for exits or heads, such as 'all_exits'")
    label = targets["label"]
    if logits.shape[1] == 1:
        losses = functional.binary_cross_entropy_with_logits(
            logits[:, 0].float(), label.float(), reduction="none"
        )
    else:
        losses = functional.cross_entropy(logits.float(), label.long(), reduction="none")
    return (losses * targets["weight"] if "weight" in targets else losses).sum()
