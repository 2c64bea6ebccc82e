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
from as2ray.objectives.base import Moment, Task
from as2ray.objectives.pointwise import cross_entropy

Sampler = Callable[[Moment], Sequence[int]]
"""Numbers of the exits that learn at a moment, ascending."""


def uniform(moment: Moment) -> Sequence[int]:
    """One exit, each as likely (the paper's choice)."""
    return [int(moment.random.integers(moment.exits))]


def in_turn(moment: Moment) -> Sequence[int]:
    """One exit after the other (the paper's round-robin)."""
    return [moment.step % moment.exits]


def early(moment: Moment) -> Sequence[int]:
    """One exit; at first the lowest is the likelier, from the middle of the run on all are alike.

    The paper names a "parametrized bias towards early rankers for the first few epochs" and no
    formula. Here exit i has weight (exits - i) ** b, where b falls from 1 to 0 in half the run.
    """
    bias = max(0.0, 1.0 - 2.0 * moment.step / moment.steps)
    weights = np.arange(moment.exits, 0, -1.0) ** bias
    return [int(moment.random.choice(moment.exits, p=weights / weights.sum()))]


def every(moment: Moment) -> Sequence[int]:
    """All exits: their losses are added."""
    return range(moment.exits)


@dataclass(frozen=True)
class Exits:
    """The loss of the exits that learn at a step, and no more of the model than they need."""

    sampler: Sampler

    def at(self, moment: Moment) -> Task:
        """The exits that learn at a moment.

        Raises:
            TrainingError: The ranker has none.
        """
        if moment.exits == 0:
            raise TrainingError(
                "a ranker without exits",
                expected="a cascade: this objective samples its exits",
                mend="name the cascade's `exits`, or take an objective such as 'cross_entropy'",
            )
        return Task(of_exits, {"exits": self.sampler(moment)})


def of_exits(logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy, summed over the batch and over exits.

    Args:
        logits: Shape [sequences, exits, 2].
        targets: `label`, 0 or 1, shape [sequences].
    """
    losses = [cross_entropy(of_exit, targets) for of_exit in logits.unbind(1)]
    return sum(losses[1:], losses[0])
