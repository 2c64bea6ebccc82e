"""Checks of probabilities and binary labels."""

import numpy as np

from as2ray.errors import EvaluationError


def check_binary_labels(labels: np.ndarray) -> None:
    """Raises an error unless the labels are 0 and 1 and both occur.

    Raises:
        EvaluationError: Other labels, or one kind alone, on which nothing can be fitted.
    """
    _check_label_values(labels)
    if len(np.unique(labels)) < 2:
        problem = f"all of {len(labels):,} labels are {next(iter(labels), None)}"
        raise EvaluationError(problem, fix="fit on a split with positive and negative candidates")


def _check_label_values(labels: np.ndarray) -> None:
    if not np.isin(labels, (0, 1)).all():
        raise EvaluationError(f"labels must be 0 or 1, not {np.unique(labels)[:4].tolist()}")


def check_probabilities(scores: np.ndarray, labels: np.ndarray) -> None:
    """Raises an error unless there is one score from 0 to 1 for every label 0 or 1.

    Raises:
        EvaluationError: Other labels or scores, different numbers of them, or none.
    """
    _check_label_values(labels)
    if not (len(scores) == len(labels) > 0 and np.all((scores >= 0) & (scores <= 1))):
        low, high = np.min(scores, initial=np.inf), np.max(scores, initial=-np.inf)
        raise EvaluationError(
            f"{len(scores):,} scores from {low:g} to {high:g} for {len(labels):,} labels; every "
            "label needs a score from 0 to 1, not a sort key"
        )
