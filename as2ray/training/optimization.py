"""The learning rate over a run, and the optimiser it drives.

Knows torch. Must not know data or Ray.
"""

from torch import nn
from torch.optim import AdamW

from as2ray.training.config import TrainingConfig


def compute_learning_rate(config: TrainingConfig, progress: float) -> float:
    """The learning rate when `progress` (0 to 1) of the run is done.

    `linear`: up to the peak over the warm-up, then down to 0 at the end. `triangular`: up over
    the warm-up, down over as much again, and so on (Smith 2017; one triangle with warmup 0.5).
    `constant`: up over the warm-up, then level.
    """
    peak, warmup = config.learning_rate, config.warmup_ratio
    if config.lr_scheduler_type == "triangular":
        return peak * (1.0 - abs((progress / warmup) % 2.0 - 1.0))
    if progress < warmup:
        return peak * progress / warmup
    return (
        peak if config.lr_scheduler_type == "constant" else peak * (1.0 - progress) / (1.0 - warmup)
    )


def create_optimizer(model: nn.Module, config: TrainingConfig, encoder_name: str = "") -> AdamW:
    """AdamW with weight decay on matrices alone, and with a rate of its own for the head if asked.

    Args:
        model: What is trained.
        training: Rates and decay; each group's rate is its peak.
        body: Name of the encoder inside the network; what bears another name is the head.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, weights in model.named_parameters():
        if weights.requires_grad:
            head = config.head_learning_rate is not None and f".{encoder_name}." not in f".{name}"
            groups.setdefault((head, weights.ndim >= 2), []).append(weights)
    rates = {False: config.learning_rate, True: config.head_learning_rate}
    return AdamW(
        [
            {"params": held, "lr": rates[head], "weight_decay": config.weight_decay * matrix}
            for (head, matrix), held in sorted(groups.items(), key=lambda g: (g[0][0], -g[0][1]))
        ],
        eps=1e-8,
        fused=True,
    )
