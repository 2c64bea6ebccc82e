"""Objectives: one short loss a file, over logits. Must not know models' insides or Ray.

An objective takes logits and what belongs to each sequence, and returns the loss *summed* over
the sequences: the training loop divides by the global batch, however many workers share it.
"""

from collections.abc import Mapping

from as2ray.errors import ConfigError
from as2ray.losses.base import Always, Loss, StepContext, StepLoss
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.exits import (
    ExitLoss,
    all_exits,
    round_robin,
    sample_early_biased,
    sample_uniform,
)
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.losses.pointwise import cross_entropy
from as2ray.losses.two_in_one import TwoInOneLoss

__all__ = [
    "LOSSES",
    "DistillationLoss",
    "ExitLoss",
    "ListwiseLoss",
    "MarginRankingLoss",
    "StepContext",
    "Loss",
    "StepLoss",
    "TwoInOneLoss",
    "ConfigurableLoss",
    "get_loss",
]

ConfigurableLoss = DistillationLoss | ListwiseLoss | MarginRankingLoss | TwoInOneLoss
"""Objectives that recipes describe by their settings."""

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Always(cross_entropy),
    "uniform_exit": ExitLoss(sample_uniform),
    "exits_in_turn": ExitLoss(round_robin),
    "early_exit": ExitLoss(sample_early_biased),
    "every_exit": ExitLoss(all_exits),
    "margin": MarginRankingLoss(),
    "listwise": ListwiseLoss(),
}
"""Objectives by the name that recipes give them."""


def get_loss(name: str | ConfigurableLoss) -> Loss:
    """The objective of that name; one that has settings is its own.

    Raises:
        RecipeError: There is none.
    """
    if not isinstance(name, str):
        return name
    if name not in LOSSES:
        raise ConfigError(
            f"objective {name!r}; expected one of {sorted(LOSSES)}",
        )
    return LOSSES[name]
