"""Which layers, exits and heads a ranker may have; known before its weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from as2ray.errors import ConfigError


def check_exit_layers(exit_layers: Sequence[int], num_layers: int) -> None:
    """Checks that exits are ascending layers of an encoder.

    Raises:
        ConfigError: They are not.
    """
    is_ascending = len(exit_layers) > 0 and all(a < b for a, b in pairwise(exit_layers))
    if not (is_ascending and exit_layers[0] >= 1 and exit_layers[-1] <= num_layers):
        raise ConfigError(
            f"exit_layers={list(exit_layers)} are not ascending numbers from 1 to the "
            f"{num_layers} layers of the encoder"
        )


class ShapeOptions(Protocol):
    """The part of a `ModelSpec` that decides on layers, exits and heads."""

    @property
    def num_layers(self) -> int | None:
        """Keep only the first layers of the encoder."""

    @property
    def exit_layers(self) -> Sequence[int] | None:
        """Number of layers below each partial classifier, ascending."""

    @property
    def num_ranking_heads(self) -> int:
        """CERBERUS's heads after the last exit."""


@dataclass(frozen=True)
class RankerShape:
    """Layers, exits and heads of a ranker; known before its weights are read."""

    num_layers: int
    """Layers of the encoder, up to the last exit."""
    exit_layers: tuple[int, ...] = ()
    num_ranking_heads: int = 0
    is_joint: bool = False
    extract_answers: bool = False

    def __str__(self) -> str:
        kind = "a joint model" if self.is_joint else "an encoder"
        exits = f", exits {list(self.exit_layers)}" if self.exit_layers else ""
        return f"{kind} of {self.num_layers} layers{exits}, {self.num_ranking_heads} ranking heads"


def check_model_spec(
    spec: ShapeOptions,
    encoder_layers: int,
    start_shape: RankerShape | None = None,
    *,
    is_joint: bool = False,
    extract_answers: bool = False,
) -> RankerShape:
    """Checks that layers, exits, heads and kind of a ranker go together; needs no weights.

    An encoder or a pointwise ranker can be truncated and can get exits, heads after its last exit,
    or the heads of a joint model. A cascade, a sequential ranker or a joint model keeps its layers,
    exits and heads.

    Args:
        spec: A `ModelSpec`, or anything else with its fields `num_layers`, `exit_layers` and
            `num_ranking_heads`.
        encoder_layers: Layers of the encoder that training starts from (`encoder_num_layers`).
        start_shape: Shape of the ranker that training starts from; None if its kind is not known,
            as of a path of which only the number of layers has been read.
        is_joint: Whether the loss trains a joint model (`TwoInOneLoss`).
        extract_answers: Whether the joint model also extracts short answers.

    Returns:
        Shape of the ranker that `init_ranker` will create.

    Raises:
        ConfigError: They do not go together.
    """
    num_layers, exit_layers = spec.num_layers, spec.exit_layers
    num_ranking_heads = spec.num_ranking_heads
    if start_shape is not None and (start_shape.exit_layers or start_shape.is_joint):
        is_unchanged = (
            num_layers is None
            and (exit_layers is None or tuple(exit_layers) == start_shape.exit_layers)
            and num_ranking_heads in (0, start_shape.num_ranking_heads)
            and is_joint == start_shape.is_joint
            and extract_answers <= start_shape.extract_answers
        )
        if not is_unchanged:
            raise ConfigError(
                f"{num_layers=}, {exit_layers=}, {num_ranking_heads=}, {is_joint=} and "
                f"{extract_answers=} would change {start_shape}; cascades and joint models keep "
                "their layers, exits and heads",
                fix="start from an encoder or a pointwise ranker",
            )
        return start_shape
    num_layers = encoder_layers if num_layers is None else num_layers
    if not 1 <= num_layers <= encoder_layers:
        raise ConfigError(f"{num_layers=} is not from 1 to {encoder_layers}")
    if extract_answers and not is_joint:
        raise ConfigError("extract_answers=True needs a joint model of passages and sentences")
    if exit_layers is None:
        if num_ranking_heads:
            raise ConfigError(f"{num_ranking_heads=} needs exit_layers: heads follow the last exit")
        return RankerShape(num_layers, (), 0, is_joint, extract_answers)
    if is_joint:
        raise ConfigError(f"a joint model has no exits, but exit_layers={list(exit_layers)}")
    check_exit_layers(exit_layers, num_layers)
    last_exit = exit_layers[-1]
    # The encoder of a checkpoint with ranking heads ends at its last exit.
    if num_ranking_heads and start_shape is not None and last_exit == num_layers:
        raise ConfigError(
            f"{num_ranking_heads=} needs layers above the last exit, but the encoder ends there",
            fix=f"use a last exit below {last_exit}",
        )
    return RankerShape(last_exit, tuple(exit_layers), num_ranking_heads)
