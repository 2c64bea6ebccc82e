"""Weights of an ensemble's members.

Knows Optuna's trials. Must not know scores or Ray.
"""

from collections.abc import Mapping
from typing import Any


def suggest(trial: Any, num_members: int) -> None:
    """Asks a trial of Optuna for a weight of each member, from 0 to 1."""
    for number in range(num_members):
        trial.suggest_float(f"weight_{number}", 0.0, 1.0)


def apply_params(params: Mapping[str, Any], num_members: int) -> tuple[float, ...]:
    """Weights that sum to 1, of a trial's answers; equal ones where all were 0.

    Args:
        config: What `suggest` was answered.
        members: Of the ensemble.
    """
    weights = [float(params[f"weight_{number}"]) for number in range(num_members)]
    total = sum(weights)
    return tuple(w / total for w in weights) if total > 0 else (1.0 / num_members,) * num_members
