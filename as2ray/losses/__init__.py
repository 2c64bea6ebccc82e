"""Losses over the outputs of models, one per file; no knowledge of models or Ray."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from as2ray.errors import lookup
from as2ray.losses.base import Loss
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
from as2ray.losses.pointwise import CrossEntropyLoss
from as2ray.losses.two_in_one import TwoInOneLoss

ConfigurableLoss = Annotated[
    DistillationLoss | ListwiseLoss | MarginRankingLoss | TwoInOneLoss, Field(discriminator="type")
]
"""Losses with settings; in a recipe `type` names the loss."""

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": CrossEntropyLoss(),
    "uniform_exit": ExitLoss(sample_uniform),
    "uniform_exit_stop_gradient": ExitLoss(sample_uniform, stop_gradient=True),
    "round_robin_exit": ExitLoss(round_robin),
    "early_biased_exit": ExitLoss(sample_early_biased),
    "all_exits": ExitLoss(all_exits),
    "margin_ranking": MarginRankingLoss(),
    "listwise_cross_entropy": ListwiseLoss(),
}
"""Losses without settings, or with default settings, by name."""


def get_loss(loss: str | ConfigurableLoss) -> Loss:
    """Returns the loss with this name; a loss with settings is returned as it is.

    Raises:
        ConfigError: Unknown name.
    """
    return lookup(LOSSES, loss, "loss") if isinstance(loss, str) else loss
