"""Measures the calibration of scores: reliability diagram, ECE and Brier score."""

from dataclasses import dataclass

import numpy as np

from as2ray.tables.score_checks import check_probabilities


@dataclass(frozen=True)
class Reliability:
    """Calibration of scores, in total and by bins of equal width. Empty bins are left out."""

    mean_scores: tuple[float, ...]
    """Mean score of each bin."""
    accuracy: tuple[float, ...]
    """Share of positive candidates in each bin."""
    bin_counts: tuple[int, ...]
    """Number of pairs in each bin."""
    ece: float
    """Expected calibration error: mean distance of score and accuracy, weighted by pairs."""
    brier: float
    """Brier score: mean squared distance of score and label."""


def measure_reliability(scores: np.ndarray, labels: np.ndarray, num_bins: int = 15) -> Reliability:
    """Measures calibration over bins of equal width.

    Args:
        scores: From 0 to 1, shape [pairs].
        labels: 0 or 1, shape [pairs].
        num_bins: Number of bins.

    Raises:
        EvaluationError: Scores outside [0, 1], other labels, or none.
    """
    check_probabilities(scores, labels)
    bin_index = np.minimum((scores * num_bins).astype(int), num_bins - 1)
    counts = np.bincount(bin_index, minlength=num_bins)
    is_used = counts > 0
    mean_scores = np.bincount(bin_index, scores, num_bins)[is_used] / counts[is_used]
    accuracy = np.bincount(bin_index, labels, num_bins)[is_used] / counts[is_used]
    return Reliability(
        tuple(mean_scores.tolist()),
        tuple(accuracy.tolist()),
        tuple(counts[is_used].tolist()),
        float(np.abs(mean_scores - accuracy) @ counts[is_used] / len(scores)),
        float(np.mean((scores - labels) ** 2)),
    )
