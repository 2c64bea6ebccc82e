"""What the training loop knows of an objective: what it asks of the model at a step, and its loss.

Knows tensors. Must not know models or any one objective.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""What the model says (logits, in most) and what belongs to each sequence, to the loss *summed*
over the sequences: the loop divides by the global batch, however many workers share it."""


@dataclass(frozen=True)
class StepContext:
    """Where a run is; the same on every worker."""

    step: int = 0
    """Steps done."""
    total_steps: int = 1
    """Steps of the run."""
    seed: int = 0
    """Of the run."""
    num_exits: int = 0
    """Exits of the ranker; 0 where it has none."""

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this step alone, so that a resumed run draws them again."""
        return np.random.default_rng([self.seed, self.step])


@dataclass(frozen=True)
class StepLoss:
    """What there is to do at a step."""

    loss: LossFunction
    """Of the logits that come back."""
    forward_kwargs: Mapping[str, Any]
    """What of its forward pass the model is asked for, beside the batch."""


class Loss(Protocol):
    """A loss that may be another at each step."""

    def for_step(self, context: StepContext) -> StepLoss:
        """What there is to do at a moment."""


@dataclass(frozen=True)
class Always:
    """The same loss of the whole forward pass at every step."""

    loss: LossFunction

    def for_step(self, context: StepContext) -> StepLoss:
        """The loss."""
        return StepLoss(self.loss, {})
