"""Losses over the outputs of models, one per file; no knowledge of models or Ray."""

import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from inspect import getsource
from typing import Annotated, Any

from pydantic import Field

from as2ray.errors import ConfigError, lookup
from as2ray.losses.base import FunctionLoss, Loss, LossFunction
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
from as2ray.plugins import import_object, is_import_path

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


def get_loss(loss: str | ConfigurableLoss | Loss | LossFunction | type[Loss]) -> Loss:
    """Returns the loss that is meant.

    Args:
        loss: A name of `LOSSES`; `module:name` of a loss of your own; a loss; or a function of the
            output of the model and the targets, which returns the loss summed over the batch.

    Raises:
        ConfigError: Unknown name, or no loss.
    """
    if isinstance(loss, str):
        if is_import_path(loss):
            return get_loss(import_object(loss, "loss"))
        return lookup(LOSSES, loss, "loss")
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss()
    if isinstance(loss, Loss):
        return loss
    if callable(loss) and not isinstance(loss, type):
        return FunctionLoss(loss)
    raise ConfigError(f"{loss!r} is no loss", fix="a loss is a name, a `Loss` or a function")


def import_path(loss: Callable[..., Any]) -> str:
    """Returns `module:name` of a loss that recipes and other processes can import.

    Raises:
        ConfigError: It is a lambda, an inner function or an object without a name.
    """
    path = f"{getattr(loss, '__module__', None)}:{getattr(loss, '__qualname__', '')}"
    if "<" in path or path.startswith("None") or path.endswith(":"):
        problem = f"the loss {loss!r} has no name by which it can be imported"
        raise ConfigError(problem, fix="define a function or class at the top of a module")
    return path


def source_digest(loss: str) -> str:
    """Returns a hash of the source text of a loss that is named by `module:name`.

    It is that of the module that is named and of the one that defines the loss: there are its
    parameters, constants and helpers. Of a loss of as2ray, a script or a notebook it is the text of
    the loss alone, as the rest often changes for other reasons.

    Raises:
        ConfigError: It cannot be imported, or its source text is not known.
    """
    value = import_object(loss, "loss")
    defined = type(value) if isinstance(value, Loss) else value
    modules = dict.fromkeys([loss.partition(":")[0], getattr(defined, "__module__", "")])
    try:
        hashed = [m for m in modules if m.partition(".")[0] not in ("__main__", "as2ray", "")]
        text = "".join(getsource(sys.modules[m]) for m in hashed) or getsource(defined)
    except (OSError, TypeError) as error:
        fix = "define it in a file, or in a cell of a notebook"
        raise ConfigError(f"loss {loss!r}: its source text is not known", fix=fix) from error
    return sha256(text.encode()).hexdigest()[:16]
