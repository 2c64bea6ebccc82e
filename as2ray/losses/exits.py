"""Training a cascade: which exits learn at a step (Cascade Transformer, section 4.3.1).

Knows logits of exits and how far a run is. Must not know models.

For every mini-batch one ranker is sampled, and its loss goes back to the embeddings; what lies
above it is not even run. Uniform sampling worked best for the paper, which also names two others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from as2ray.errors import TrainingError
from as2ray.losses.base import StepContext, StepLoss
from as2ray.losses.pointwise import cross_entropy

ExitSampler = Callable[[StepContext], Sequence[int]]
"""Numbers of the exits that learn at a moment, ascending."""


def sample_uniform(context: StepContext) -> Sequence[int]:
    """One exit, each as likely (the paper's choice)."""
    return [int(context.rng.integers(context.num_exits))]


def round_robin(context: StepContext) -> Sequence[int]:
    """One exit after the other (the paper's round-robin)."""
    return [context.step % context.num_exits]


def sample_early_biased(context: StepContext) -> Sequence[int]:
    """One exit; at first the lowest is the likelier, from the middle of the run on all are alike.

    The paper names a "parametrized bias towards early rankers for the first few epochs" and no
    formula. Here exit i has weight (exits - i) ** b, where b falls from 1 to 0 in half the run.
    """
    bias = max(0.0, 1.0 - 2.0 * context.step / context.total_steps)
    weights = np.arange(context.num_exits, 0, -1.0) ** bias
    return [int(context.rng.choice(context.num_exits, p=weights / weights.sum()))]


def all_exits(context: StepContext) -> Sequence[int]:
    """All exits: their losses are added."""
    return range(context.num_exits)


@dataclass(frozen=True)
class ExitLoss:
    """The loss of the exits that learn at a step, and no more of the model than they need."""

    sampler: ExitSampler

    def for_step(self, context: StepContext) -> StepLoss:
        """The exits that learn at a moment.

        Raises:
            TrainingError: The ranker has none.
        """
        if context.num_exits == 0:
            raise TrainingError(
                "a ranker without exits; expected a cascade: this objective samples its exits",
                fix="name the cascade's `exits`, or take an objective such as 'cross_entropy'",
            )
        return StepLoss(exit_cross_entropy, {"exits": self.sampler(context)})


def exit_cross_entropy(logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy, summed over the batch and over exits.

    Args:
        logits: Shape [sequences, exits, 2].
        targets: `label`, 0 or 1, shape [sequences].
    """
    losses = [cross_entropy(of_exit, targets) for of_exit in logits.unbind(1)]
    return sum(losses[1:], losses[0])
