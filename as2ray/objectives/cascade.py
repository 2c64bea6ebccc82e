"""Training a cascade: which exits learn at a step (Cascade Transformer, section 4.3.1).

Knows logits of exits and how far a run is. Must not know models.

For every mini-batch one ranker is sampled, and its loss goes back to the embeddings; what lies
above it is not even run. Uniform sampling worked best for the paper, which also names two others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from as2ray.objectives.pointwise import cross_entropy

Sampler = Callable[[np.random.Generator, int, int, int], Sequence[int]]
"""(random numbers, step, steps of the run, exits) -> numbers of the exits that learn, ascending."""


def uniform(random: np.random.Generator, step: int, steps: int, exits: int) -> Sequence[int]:
    """One exit, each as likely (the paper's choice)."""
    return [int(random.integers(exits))]


def in_turn(random: np.random.Generator, step: int, steps: int, exits: int) -> Sequence[int]:
    """One exit after the other (the paper's round-robin)."""
    return [step % exits]


def early(random: np.random.Generator, step: int, steps: int, exits: int) -> Sequence[int]:
    """One exit; at first the lowest is the likelier, from the middle of the run on all are alike.

    The paper names a "parametrized bias towards early rankers for the first few epochs" and no
    formula. Here exit i has weight (exits - i) ** b, where b falls from 1 to 0 in half the run.
    """
    bias = max(0.0, 1.0 - 2.0 * step / steps)
    weights = np.arange(exits, 0, -1.0) ** bias
    return [int(random.choice(exits, p=weights / weights.sum()))]


def every(random: np.random.Generator, step: int, steps: int, exits: int) -> Sequence[int]:
    """All exits: their losses are added."""
    return range(exits)


@dataclass(frozen=True)
class ExitLoss:
    """Cross entropy, summed over the batch and over the exits that learn at this step."""

    sampler: Sampler

    def exits(
        self, random: np.random.Generator, step: int, steps: int, exits: int
    ) -> Sequence[int]:
        """Numbers of the exits whose logits the loss wants; see `Sampler`."""
        return self.sampler(random, step, steps, exits)

    def __call__(self, logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """The loss.

        Args:
            logits: Shape [sequences, exits asked for, 2].
            targets: `label`, 0 or 1, shape [sequences].
        """
        losses = [cross_entropy(of_exit, targets) for of_exit in logits.unbind(1)]
        return sum(losses[1:], losses[0])
