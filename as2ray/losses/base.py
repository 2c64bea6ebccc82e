"""The interface between the trainer and a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Targets = Mapping[str, "Tensor"]
"""Labels and other data of the sequences of a batch, by name."""


@dataclass(frozen=True)
class StepContext:
    """Position in a training run; the same on every worker."""

    step: int = 0
    """Optimizer steps before this one."""
    total_steps: int = 1
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of the run."""
    exit_layers: tuple[int, ...] = ()
    """Layers below each exit of the ranker; empty for a ranker without exits."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Parts of the losses that were computed with this context, by name; they are logged."""

    @property
    def num_exits(self) -> int:
        """Exits of the ranker; 0 for a ranker without exits."""
        return len(self.exit_layers)

    def add_part(self, name: str, value: Tensor) -> None:
        """Adds to a part of the loss, summed over the examples of a batch."""
        value = value.detach()
        self.parts[name] = self.parts[name] + value if name in self.parts else value

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of this step, so that a resumed run draws the same numbers."""
        return np.random.default_rng([self.seed, self.step])


class Loss(ABC):
    """A loss over the outputs of a model; it may differ from step to step."""

    def forward_kwargs(self, context: StepContext) -> Mapping[str, Any]:
        """Returns keyword arguments of the model's forward pass at a step, besides the batch."""
        return {}

    @abstractmethod
    def compute(self, output: Any, targets: Targets, context: StepContext) -> Tensor:
        """Computes the loss *summed* over the examples of a batch.

        The trainer divides by the global batch size, however many workers share the batch. A loss
        of several parts also adds each to the context, for the log.

        Args:
            output: What the model returns, usually logits.
            targets: Labels and other data of each sequence.
            context: The step.
        """


LossFunction = Callable[[Any, Targets], "Tensor"]
"""`function(output, targets)`: the loss summed over the examples of a batch; see `Loss.compute`."""


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A loss that is a function."""

    function: LossFunction

    def compute(self, output: Any, targets: Targets, context: StepContext) -> Tensor:
        """Calls the function."""
        return self.function(output, targets)
