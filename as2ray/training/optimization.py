"""Learning-rate schedules and the AdamW optimizer."""

from torch import nn
from torch.optim import AdamW

from as2ray.training.config import TrainingConfig


def compute_learning_rate(config: TrainingConfig, progress: float, num_steps: int) -> float:
    """Returns the learning rate at a point of the run.

    `linear` warms up to the peak and decays to 0 at the end. `triangular` falls as long as the
    warm-up took, rises again, and so on (Smith 2017); `linear` is the reading with one triangle.
    `constant` stays at the peak after the warm-up.

    Args:
        config: Peak, schedule and warm-up.
        progress: Completed share of the run, 0 to 1.
        num_steps: Steps between 0 and 1.
    """
    peak, warmup = config.learning_rate, config.warmup_share(num_steps)
    if config.lr_scheduler_type == "triangular":
        return peak * (1.0 - abs((progress / warmup) % 2.0 - 1.0))
    if progress < warmup:
        return peak * progress / warmup
    if config.lr_scheduler_type == "constant":
        return peak
    return peak * (1.0 - progress) / (1.0 - warmup)


def create_optimizer(model: nn.Module, config: TrainingConfig, encoder_name: str = "") -> AdamW:
    """Creates AdamW with weight decay on matrices only; the head may have its own learning rate.

    Args:
        model: The model to train.
        config: Learning rates and weight decay; each group's learning rate is its peak.
        encoder_name: Name of the encoder's module inside the network. Parameters outside it are
            the head's.
    """
    has_head_rate = config.head_learning_rate is not None
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_head = has_head_rate and f".{encoder_name}." not in f".{name}"
            groups.setdefault((is_head, parameter.ndim >= 2), []).append(parameter)
    peaks = {False: config.learning_rate, True: config.head_learning_rate}
    # The encoder's groups come first, matrices before vectors.
    order = sorted(groups, key=lambda group: (group[0], not group[1]))
    return AdamW(
        [
            {
                "params": groups[is_head, is_matrix],
                "lr": peaks[is_head],
                "weight_decay": config.weight_decay * is_matrix,
            }
            for is_head, is_matrix in order
        ],
        eps=1e-8,
        fused=True,
    )
