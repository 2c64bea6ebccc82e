"""Pointwise cross entropy (TANDA, section 3.2): L = - sum over labels of y log softmax(W x + b).

Knows logits and labels. Must not know models.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from as2ray.errors import TrainingError


def cross_entropy(logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy *summed* over the batch; the training loop divides by the global batch.

    Args:
        logits: Shape [sequences, 2], or [sequences, 1] for a binary logit.
        targets: `label`, 0 or 1, shape [sequences].
    """
    if logits.ndim != 2:
        raise TrainingError(
            f"logits of shape {list(logits.shape)}"
            "; expected [sequences, 1 or 2]: a ranker with one output",
            fix="name an objective of exits or heads, such as 'every_exit'",
        )
    label = targets["label"]
    if logits.shape[-1] == 1:
        return functional.binary_cross_entropy_with_logits(
            logits[:, 0].float(), label.float(), reduction="sum"
        )
    return functional.cross_entropy(logits.float(), label.long(), reduction="sum")
