"""Pointwise cross entropy (TANDA, section 3.2): L = - sum over labels of y log softmax(W x + b).

Knows logits and labels. Must not know models.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional


def cross_entropy(logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy *summed* over the batch; the training loop divides by the global batch.

    Args:
        logits: Shape [sequences, 2], or [sequences, 1] for a binary logit.
        targets: `label`, 0 or 1, shape [sequences].
    """
    label = targets["label"]
    if logits.shape[-1] == 1:
        return functional.binary_cross_entropy_with_logits(
            logits[:, 0].float(), label.float(), reduction="sum"
        )
    return functional.cross_entropy(logits.float(), label.long(), reduction="sum")
