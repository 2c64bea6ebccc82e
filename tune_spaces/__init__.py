"""Search spaces, one per file; no knowledge of how a trial runs."""

from typing import Any

from as2ray.errors import lookup
from tune_spaces import distillation
from tune_spaces.run_fields import RunFields, Values

TRAINING_SPACES = {"distillation": distillation}
"""Spaces of the settings of training runs, by the names that recipes give them."""


def training_space(space: str | dict[str, Values]) -> Any:
    """Returns `suggest` and `apply_params` of a named space, or of one that lists a run's fields.

    Raises:
        ConfigError: No space has this name.
    """
    if isinstance(space, str):
        return lookup(TRAINING_SPACES, space, "search space")
    return RunFields(space)
