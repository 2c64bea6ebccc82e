"""Search space of the weights of an ensemble's members."""

from collections.abc import Mapping
from typing import Any


def suggest(trial: Any, num_members: int) -> None:
    """Suggests a weight of each member, from 0 to 1, in an Optuna trial."""
    for number in range(num_members):
        trial.suggest_float(f"weight_{number}", 0.0, 1.0)


def apply_params(params: Mapping[str, Any], num_members: int) -> tuple[float, ...]:
    """Returns weights that sum to 1; equal ones if all suggested weights are 0.

    Args:
        params: Parameters of a trial, from `suggest`.
        num_members: Number of members.
    """
    weights = [float(params[f"weight_{number}"]) for number in range(num_members)]
    total = sum(weights)
    return tuple(w / total for w in weights) if total > 0 else (1.0 / num_members,) * num_members
