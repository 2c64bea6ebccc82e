"""Measures whether scores are probabilities, and finds the one from which on answers are given."""

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from as2ray.tables.score_checks import check_probabilities

FEW_QUESTIONS = 30
"""Fewer labeled questions give rough thresholds, which is said where one is fitted."""

CONFIDENCE = 0.9
"""One-sided confidence of the precision of given answers, where it is high."""
TESTED_SHARES = 2.0 ** (np.arange(-18, 1) / 3)
"""Tested shares of the questions: from a 64th to all, three for each doubling."""


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
    """Score from which on answers are precise enough; None if there is none."""
    reachable_precision: float
    """Highest `min_precision` with a threshold."""
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
    scores: np.ndarray, is_right: np.ndarray, min_precision: float, *, high_confidence: bool = False
) -> Abstention:
    """Finds the lowest score from which on answers are right often enough.

    The best score of a question is the maximum of many scores and therefore too high, even if each
    score is calibrated. The precision is counted on questions with and without an answer instead.

    Args:
        scores: Score of each question's first candidate, from 0 to 1, shape [questions].
        is_right: Whether that candidate is an answer, 0 or 1, shape [questions].
        min_precision: Minimum share of right answers among those that are given. It is reached on
            these questions, and so on others like them about half of the time.
        high_confidence: Whether others reach it with a probability of `CONFIDENCE`: of
            `TESTED_SHARES` more and more are answered while the lower bound of their precision
            (Clopper and Pearson 1934) is as high. This starts with the lowest share for which right
            answers alone would do, and once more halfway from there to the last one, each with half
            of the error rate (fixed-sequence testing, Angelopoulos et al. 2021, "Learn then Test").
            Far fewer questions get an answer.

    Raises:
        EvaluationError: Scores outside 0 to 1, or other labels.
    """
    check_probabilities(scores, is_right)
    order = np.argsort(-scores, kind="stable")
    # Equal scores are above the threshold together or not at all.
    ends = np.flatnonzero(np.diff(scores[order], append=-1.0))
    num_given, num_right = ends + 1, np.cumsum(is_right[order])[ends]
    precision = num_right / num_given
    if high_confidence:
        last, reachable = _test_precision(num_given, num_right, min_precision)
    else:
        is_precise, reachable = precision >= min_precision, float(precision.max())
        last = int(np.flatnonzero(is_precise)[-1]) if is_precise.any() else None
    threshold = None if last is None else float(scores[order][ends[last]])
    return Abstention(threshold, reachable, num_given / len(scores), 1 - precision)


def _test_precision(
    num_given: np.ndarray, num_right: np.ndarray, min_precision: float
) -> tuple[int | None, float]:
    """Returns the index of the last number of answers that pass, and the highest precision."""
    tested = np.unique(np.searchsorted(num_given, np.ceil(num_given[-1] * TESTED_SHARES)))
    given, right = num_given[tested], num_right[tested]
    lowest, highest = (
        np.where(number > 0, betaincinv(number, given - number + 1, (1 - CONFIDENCE) / 2), 0.0)
        for number in (right, given)
    )

    def find_last(precision: float) -> int | None:
        """Returns the index of the largest tested share that is precise enough."""
        first = int(np.searchsorted(highest, precision))
        passes = np.append(lowest >= precision, False)
        starts = (first, (first + len(given)) // 2)
        stops = [start + int(np.argmin(passes[start:])) for start in starts]
        return max((stop - 1 for start, stop in zip(starts, stops) if stop > start), default=None)

    last = find_last(min_precision)
    reachable = max((float(p) for p in lowest if find_last(p) is not None), default=0.0)
    return (None if last is None else int(tested[last])), reachable
