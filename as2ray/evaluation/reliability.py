"""How far scores are from probabilities: reliability diagram, ECE and Brier score."""

from dataclasses import dataclass

import numpy as np

from as2ray.tables.score_checks import check_probabilities


@dataclass(frozen=True)
class Reliability:
    """How far scores are from the shares of answers among them."""

    mean_scores: tuple[float, ...]
    """Of each bin that holds any."""
    accuracy: tuple[float, ...]
    """Of answers in it."""
    bin_counts: tuple[int, ...]
    """In it."""
    ece: float
    """Expected calibration error: mean distance of the two, weighted by pairs."""
    brier: float
    """Mean squared distance of score and label."""


def measure_reliability(scores: np.ndarray, labels: np.ndarray, num_bins: int = 15) -> Reliability:
    """Measures calibration over bins of equal width.

    Args:
        scores: From 0 to 1, shape [pairs].
        labels: 0 or 1, shape [pairs].
        bins: How many.
    """
    check_probabilities(scores, labels)
    place = np.minimum((scores * num_bins).astype(int), num_bins - 1)
    sizes = np.bincount(place, minlength=num_bins)
    held = sizes > 0
    mean = np.bincount(place, scores, num_bins)[held] / sizes[held]
    share = np.bincount(place, labels, num_bins)[held] / sizes[held]
    return Reliability(
        tuple(mean.tolist()),
        tuple(share.tolist()),
        tuple(sizes[held].tolist()),
        float(np.abs(mean - share) @ sizes[held] / len(scores)),
        float(np.mean((scores - labels) ** 2)),
    )
