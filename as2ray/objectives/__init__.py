"""Objectives: one short loss a file, over logits. Must not know models' insides or Ray.

An objective takes logits and what belongs to each sequence, and returns the loss *summed* over
the sequences: the training loop divides by the global batch, however many workers share it.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from as2ray.objectives.pointwise import cross_entropy

Objective = Callable[[Tensor, Mapping[str, Tensor]], Tensor]

OBJECTIVES: Mapping[str, Objective] = {"cross_entropy": cross_entropy}
"""Objectives by the name that recipes give them."""
