"""What the training loop knows of an objective: what it asks of the model at a step, and its loss.

Knows tensors. Must not know models or any one objective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""What the model says (logits, in most) and what belongs to each sequence, to the loss *summed*
over the sequences: the loop divides by the global batch, however many workers share it."""


@dataclass(frozen=True)
class Moment:
    """Where a run is; the same on every worker."""

    step: int = 0
    """Steps done."""
    steps: int = 1
    """Steps of the run."""
    seed: int = 0
    """Of the run."""
    exits: int = 0
    """Exits of the ranker; 0 where it has none."""

    @property
    def random(self) -> np.random.Generator:
        """Random numbers of this step alone, so that a resumed run draws them again."""
        return np.random.default_rng([self.seed, self.step])


@dataclass(frozen=True)
class Task:
    """What there is to do at a step."""

    loss: Loss
    """Of the logits that come back."""
    asked: Mapping[str, Any]
    """What of its forward pass the model is asked for, beside the batch."""


class Objective(Protocol):
    """A loss that may be another at each step."""

    def at(self, moment: Moment) -> Task:
        """What there is to do at a moment."""


@dataclass(frozen=True)
class Always:
    """The same loss of the whole forward pass at every step."""

    loss: Loss

    def at(self, moment: Moment) -> Task:
        """The loss."""
        return Task(self.loss, {})
