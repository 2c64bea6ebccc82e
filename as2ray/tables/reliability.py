"""Measures whether scores are probabilities, and finds the one from which on answers are given."""

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from as2ray.tables.score_checks import check_probabilities

CONFIDENCE = 0.9
"""One-sided confidence of the precision of given answers."""


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


@dataclass(frozen=True)
class Abstention:
    """What follows from giving an answer only from a score on."""

    threshold: float | None
    """Lowest score from which on answers are precise enough; None if none is sure to be."""
    reachable_precision: float
    """Highest precision that a threshold is sure to reach."""
    coverage: np.ndarray
    """Share of the questions that are answered from each score on, ascending, shape [scores]."""
    risk: np.ndarray
    """Share of wrong answers among those, shape [scores]."""

    @property
    def aurc(self) -> float:
        """Area under the curve of risk over coverage: the mean risk."""
        return float(np.diff(self.coverage, prepend=0.0) @ self.risk)

    def precision_at(self, coverage: float) -> float:
        """Returns the precision of the first scores that cover this share of the questions."""
        return float(1 - self.risk[np.searchsorted(self.coverage, coverage - 1e-9)])


def measure_abstention(
    scores: np.ndarray, is_right: np.ndarray, min_precision: float
) -> Abstention:
    """Finds the lowest score from which on answers are right often enough.

    The best score of a question is the maximum of many scores and therefore too high, even if each
    score is calibrated. The precision is counted on questions with and without an answer instead.

    Args:
        scores: Score of each question's first candidate, from 0 to 1, shape [questions].
        is_right: Whether that candidate is an answer, 0 or 1, shape [questions].
        min_precision: Minimum share of right answers among those that are given. A threshold
            reaches it with a confidence of `CONFIDENCE` (Clopper and Pearson 1934).

    Raises:
        EvaluationError: Scores outside 0 to 1, or other labels.
    """
    check_probabilities(scores, is_right)
    order = np.argsort(-scores, kind="stable")
    # Equal scores are above the threshold together or not at all.
    ends = np.flatnonzero(np.diff(scores[order], append=-1.0))
    num_given, num_right = ends + 1, np.cumsum(is_right[order])[ends]
    # The threshold is chosen on these questions, so their precision is too high: take a bound.
    lowest = betaincinv(num_right, num_given - num_right + 1, 1 - CONFIDENCE)
    lowest = np.where(num_right > 0, lowest, 0.0)
    precise = np.flatnonzero(lowest >= min_precision)
    threshold = float(scores[order][ends[precise[-1]]]) if len(precise) else None
    coverage, risk = num_given / len(scores), 1 - num_right / num_given
    return Abstention(threshold, float(lowest.max()), coverage, risk)
