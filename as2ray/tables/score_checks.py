"""Checks of scores and binary labels."""

import numpy as np

from as2ray.errors import EvaluationError


def check_binary_labels(labels: np.ndarray) -> None:
    """Refuses labels other than 0 and 1, or of one kind alone, on which nothing can be fitted."""
    _check_label_values(labels)
    if len(np.unique(labels)) < 2:
        raise EvaluationError(
            f"{len(labels):,} labels that are all {next(iter(labels), None)}"
            "; expected answers and others",
            fix="fit on a split that has both",
        )


def _check_label_values(labels: np.ndarray) -> None:
    if not np.isin(labels, (0, 1)).all():
        raise EvaluationError(
            f"labels {np.unique(labels)[:4].tolist()}; expected 0 or 1",
            fix="map the labels to these two",
        )


def check_probabilities(scores: np.ndarray, labels: np.ndarray) -> None:
    _check_label_values(labels)
    fine = len(scores) == len(labels) > 0 and np.all((scores >= 0) & (scores <= 1))
    if not fine:
        raise EvaluationError(
            f"{len(scores):,} scores from {np.min(scores, initial=np.inf):g} to "
            f"{np.max(scores, initial=-np.inf):g} and {len(labels):,} labels"
            "; expected a score from 0 to 1 for every label",
            fix="give a ranker's scores, not the numbers that it ranks by",
        )
