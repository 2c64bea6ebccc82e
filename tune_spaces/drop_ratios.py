"""Search space of a cascade: which exits are used, and the drop ratio after each of them."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Drop ratios of the paper's grid (section 5.5): 6 after each of 4 stages, 1,296 points."""

MAX_DROP_RATIO = 0.95
"""Highest drop ratio of the search; the paper's is 0.6."""


def param_grid(num_exits: int) -> Iterator[tuple[float, ...]]:
    """Yields the paper's grid: every combination of `RATIOS`, with all exits used."""
    return product(RATIOS, repeat=num_exits - 1)


def suggest(trial: Any, num_exits: int) -> None:
    """Suggests in an Optuna trial which exits but the last are used, and their drop ratios."""
    for number in range(num_exits - 1):
        if trial.suggest_categorical(f"use_{number}", [True, False]):
            trial.suggest_float(f"drop_{number}", 0.0, MAX_DROP_RATIO)


def apply_params(params: Mapping[str, Any], num_exits: int) -> tuple[list[int], list[float]]:
    """Returns the indices of the used exits, the last one included, and their drop ratios.

    Args:
        params: Parameters of a trial, from `suggest`.
        num_exits: Number of exits of the cascade.
    """
    used = [number for number in range(num_exits - 1) if params[f"use_{number}"]]
    return [*used, num_exits - 1], [float(params[f"drop_{number}"]) for number in used]
