"""Interpolates the weights of a ranker and of the ranker that it started from."""

from collections.abc import Mapping

import torch

from as2ray.errors import CheckpointError
from as2ray.models.ranker import Ranker


def interpolate_weights(
    tuned: Ranker, start_weights: Mapping[str, torch.Tensor], start_weight: float
) -> None:
    """Moves the weights of a ranker towards those that it started from (Wortsman et al. 2022).

    Args:
        tuned: The ranker; it is changed.
        start_weights: Weights that it started from, with the same names.
        start_weight: Weight of the start, 0 to 1.

    Raises:
        CheckpointError: The names of the weights differ.
    """
    weights = tuned.state_dict()
    if weights.keys() != start_weights.keys():
        raise CheckpointError(
            "the ranker and its start are of different kinds: "
            f"{sorted(weights.keys() ^ start_weights.keys())[:4]} are in one of them only",
            fix="start from a ranker, not from an encoder",
        )
    interpolated = {
        name: torch.lerp(w, start_weights[name].to(w), start_weight) if w.is_floating_point() else w
        for name, w in weights.items()
    }
    tuned.load_state_dict(interpolated)
