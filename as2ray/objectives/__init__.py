"""Objectives: one short loss a file, over logits. Must not know models' insides or Ray.

An objective takes logits and what belongs to each sequence, and returns the loss *summed* over
the sequences: the training loop divides by the global batch, however many workers share it.
"""

from collections.abc import Mapping

from as2ray.errors import RecipeError
from as2ray.objectives.base import Always, Moment, Objective, Task
from as2ray.objectives.cascade import Exits, early, every, in_turn, uniform
from as2ray.objectives.distillation import Distillation
from as2ray.objectives.listwise import Listwise
from as2ray.objectives.pairwise import Margin
from as2ray.objectives.pointwise import cross_entropy
from as2ray.objectives.two_in_one import TwoInOne

__all__ = [
    "OBJECTIVES",
    "Distillation",
    "Exits",
    "Listwise",
    "Margin",
    "Moment",
    "Objective",
    "Task",
    "TwoInOne",
    "WithSettings",
    "objective",
]

WithSettings = Distillation | Listwise | Margin | TwoInOne
"""Objectives that recipes describe by their settings."""

OBJECTIVES: Mapping[str, Objective] = {
    "cross_entropy": Always(cross_entropy),
    "uniform_exit": Exits(uniform),
    "exits_in_turn": Exits(in_turn),
    "early_exit": Exits(early),
    "every_exit": Exits(every),
    "margin": Margin(),
    "listwise": Listwise(),
}
"""Objectives by the name that recipes give them."""


def objective(name: str | WithSettings) -> Objective:
    """The objective of that name; one that has settings is its own.

    Raises:
        RecipeError: There is none.
    """
    if not isinstance(name, str):
        return name
    if name not in OBJECTIVES:
        raise RecipeError(
            f"objective {name!r}", expected=f"one of {sorted(OBJECTIVES)}", mend="name one of them"
        )
    return OBJECTIVES[name]
