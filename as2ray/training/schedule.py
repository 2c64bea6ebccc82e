"""The learning rate over a run, and the optimiser it drives.

Knows torch. Must not know data or Ray.
"""

from torch import nn
from torch.optim import AdamW

from as2ray.training.config import Training


def rate(training: Training, progress: float) -> float:
    """The learning rate when `progress` (0 to 1) of the run is done.

    `linear`: up to the peak over the warm-up, then down to 0 at the end. `triangular`: up over
    the warm-up, down over as much again, and so on (Smith 2017; one triangle with warmup 0.5).
    `constant`: up over the warm-up, then level.
    """
    peak, warmup = training.learning_rate, training.warmup
    if training.schedule == "triangular":
        return peak * (1.0 - abs((progress / warmup) % 2.0 - 1.0))
    if progress < warmup:
        return peak * progress / warmup
    return peak if training.schedule == "constant" else peak * (1.0 - progress) / (1.0 - warmup)


def optimiser(model: nn.Module, training: Training) -> AdamW:
    """AdamW with weight decay on matrices alone."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=training.learning_rate, eps=1e-8, fused=True)
