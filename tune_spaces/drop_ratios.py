"""Which exits of a cascade are used, and what part of the candidates goes after each.

Knows numbers of exits and Optuna's trials. Must not know scores or Ray.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Of the paper's grid (section 5.5): 6 for each of 4 stages, 1,296 choices."""

MAX_DROP_RATIO = 0.95
"""Largest drop ratio of the search, past the paper's 0.6."""


def param_grid(num_exits: int) -> Iterator[tuple[float, ...]]:
    """The paper's grid: every combination of `RATIOS`, all exits used."""
    return product(RATIOS, repeat=num_exits - 1)


def suggest(trial: Any, num_exits: int) -> None:
    """Asks a trial of Optuna for each exit but the last: is it used, and what does it drop."""
    for number in range(num_exits - 1):
        if trial.suggest_categorical(f"use_{number}", [True, False]):
            trial.suggest_float(f"drop_{number}", 0.0, MAX_DROP_RATIO)


def apply_params(params: Mapping[str, Any], num_exits: int) -> tuple[list[int], list[float]]:
    """Numbers of the exits used, the last among them, and their drop ratios, of a trial's answers.

    Args:
        config: What `suggest` was answered.
        exits: Of the cascade.
    """
    used = [number for number in range(num_exits - 1) if params[f"use_{number}"]]
    return [*used, num_exits - 1], [float(params[f"drop_{number}"]) for number in used]
