"""Search spaces, one per file; no knowledge of how a trial runs."""

from tune_spaces import distillation

TRAINING_SPACES = {"distillation": distillation}
"""Spaces of the settings of training runs, by the names that recipes give them."""
