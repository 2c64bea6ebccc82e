"""Losses of a cascade that choose the exits to train at each step (Cascade Transformer, 4.3.1).

For every mini-batch one exit is sampled. Its loss propagates back to the embeddings, and the layers
above it are not run. The paper got its best results with uniform sampling, and names two other
strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from as2ray.errors import TrainingError
from as2ray.losses.base import Loss, StepContext, Targets
from as2ray.losses.pointwise import cross_entropy
from as2ray.outputs import output_names

if TYPE_CHECKING:
    from torch import Tensor

ExitSampler = Callable[[StepContext], Sequence[int]]
"""Returns the indices of the exits to train at a step, ascending."""


def sample_uniform(context: StepContext) -> Sequence[int]:
    """Samples one exit uniformly (the paper's choice)."""
    return [int(context.rng.integers(context.num_exits))]


def round_robin(context: StepContext) -> Sequence[int]:
    """Selects one exit after the other (the paper's round-robin)."""
    return [context.step % context.num_exits]


def sample_early_biased(context: StepContext) -> Sequence[int]:
    """Samples one exit; low exits are more likely in the first half of the run.

    The paper mentions a "parametrized bias towards early rankers for the first few epochs" without
    a formula. Here exit i has weight (num_exits - i) ** b, where b falls from 1 to 0 in the first
    half of the run.
    """
    bias = max(0.0, 1.0 - 2.0 * context.step / context.total_steps)
    weights = np.arange(context.num_exits, 0, -1.0) ** bias
    return [int(context.rng.choice(context.num_exits, p=weights / weights.sum()))]


def all_exits(context: StepContext) -> Sequence[int]:
    """Selects all exits; their losses are added."""
    return range(context.num_exits)


@dataclass(frozen=True)
class ExitLoss(Loss):
    """Cross entropy of the exits that are trained at a step."""

    sampler: ExitSampler
    stop_gradient: bool = False
    """Whether the gradient of an exit ends at the exit below it, instead of at the embeddings (an
    ablation of section 4.3.1)."""

    def forward_kwargs(self, context: StepContext) -> Mapping[str, Any]:
        """Returns the exits to run.

        Raises:
            TrainingError: The ranker has no exits.
        """
        if context.num_exits == 0:
            problem = "this loss trains the exits of a cascade, and the ranker has no exits"
            raise TrainingError(
                problem, fix="set the model's `exit_layers`, or use 'cross_entropy'"
            )
        kwargs = {"exit_indices": self.sampler(context)}
        return {**kwargs, "stop_gradient": True} if self.stop_gradient else kwargs

    def compute(self, output: Tensor, targets: Targets, context: StepContext) -> Tensor:
        """Computes the cross entropy summed over the batch and over the exits that were run.

        Args:
            output: Logits of each exit or head, shape [sequences, outputs, 2].
            targets: `label`, 0 or 1, shape [sequences].
            context: The step.
        """
        losses = [cross_entropy(logits, targets) for logits in output.unbind(1)]
        exit_layers = [context.exit_layers[index] for index in self.sampler(context)]
        for name, loss in zip(output_names(exit_layers, len(losses)), losses):
            context.add_part(name, loss)
        return sum(losses[1:], losses[0])
