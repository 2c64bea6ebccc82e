"""Calibration: scores that are probabilities one can act on, and how far from it they are.

Knows scores and labels. Must not know models or files.

A fine-tuned ranker orders well and is too sure of itself. A map fitted on a development split turns
its score into the share of candidates with such a score that do answer. The map never changes an
order: isotonic regression makes ties, so rankings are made before it.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from scipy.optimize import isotonic_regression, minimize_scalar
from scipy.special import expit, logit

from as2ray.errors import EvaluationError
from as2ray.tables.score_checks import check_binary_labels, check_probabilities

CalibrationMethod = Literal["temperature", "isotonic"]
"""One number that divides the logits (Guo et al. 2017), or the best monotone map."""

PROBABILITY_EPS = 1e-6
"""Scores this close to 0 or 1 are taken for it: their logit is infinite."""


@dataclass(frozen=True)
class Calibration:
    """A monotone map from scores to probabilities, as plain values."""

    method: CalibrationMethod
    temperature: float = 1.0
    """Divides the logits; above 1 the scores were too sure."""
    score_knots: tuple[float, ...] = ()
    """Of an isotonic map, ascending."""
    probability_knots: tuple[float, ...] = ()
    """At these scores; straight lines between."""

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Probabilities, the shape of the scores."""
        if self.method == "temperature":
            return np.asarray(expit(_to_logits(scores) / self.temperature))
        return np.asarray(np.interp(scores, self.score_knots, self.probability_knots))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Calibration":
        """The map whose `asdict` went through JSON."""
        lists = {name: tuple(values[name]) for name in ("scores", "probabilities")}
        return cls(**{**values, **lists})


def fit_calibration(
    scores: np.ndarray, labels: np.ndarray, method: CalibrationMethod = "temperature"
) -> Calibration:
    """The map that makes the labels of a development split most likely.

    Args:
        scores: From 0 to 1, shape [pairs].
        labels: 0 or 1, shape [pairs].
        kind: Which map.

    Raises:
        EvaluationError: Scores outside 0 to 1, labels of one kind alone, or no such map.
    """
    check_probabilities(scores, labels)
    check_binary_labels(labels)
    if method == "temperature":
        logits, signs = _to_logits(scores), 2.0 * labels - 1.0
        # Smooth and with one minimum in 1 / T; searched over T from a hundredth to a hundred.
        found = minimize_scalar(
            lambda t: np.logaddexp(0.0, -signs * logits / np.exp(t)).mean(),
            bounds=(np.log(0.01), np.log(100.0)),
            method="bounded",
        )
        return Calibration("temperature", float(np.exp(found.x)))
    if method != "isotonic":
        raise EvaluationError(
            f"calibration {method!r}; expected one of {get_args(CalibrationMethod)}",
        )
    values, place = np.unique(scores, return_inverse=True)
    sizes = np.bincount(place)
    shares = np.bincount(place, labels) / sizes
    fitted = isotonic_regression(shares, weights=sizes).x
    # The ends of each level are enough to draw it.
    ends = np.flatnonzero(np.diff(fitted, prepend=np.nan, append=np.nan) != 0)
    keep = np.unique(np.concatenate([ends, ends - 1]))
    keep = keep[(keep >= 0) & (keep < len(values))]
    return Calibration("isotonic", 1.0, tuple(values[keep].tolist()), tuple(fitted[keep].tolist()))


def abstention_threshold(
    best_scores: np.ndarray, is_right: np.ndarray, min_precision: float = 0.5
) -> float:
    """The lowest score at which, and above which, answers are right often enough to be given.

    A question's best candidate is the highest of many scores, so its score promises more than it
    keeps; what it keeps is counted here, on questions with and without an answer.

    Args:
        best: Score of each question's best candidate, from 0 to 1, shape [questions].
        right: Whether it answers, 0 or 1, shape [questions].
        precision: Share of right answers among those given, at least.

    Returns:
        A score of `best`, or 1 where no threshold reaches the precision.
    """
    check_probabilities(best_scores, is_right)
    check_min_precision(min_precision)
    order = np.argsort(-best_scores, kind="stable")
    share = np.cumsum(is_right[order]) / np.arange(1, len(best_scores) + 1)
    # Equal scores are given together or not at all.
    ends = np.flatnonzero(np.append(best_scores[order][1:] != best_scores[order][:-1], True))
    enough = ends[share[ends] >= min_precision]
    return float(best_scores[order][enough[-1]]) if len(enough) else 1.0


def check_min_precision(min_precision: float) -> None:
    """Refuses a precision that no threshold reaches, or that every one does."""
    if not 0 < min_precision <= 1:
        raise EvaluationError(
            f"precision {min_precision}; expected above 0, at most 1",
        )


def _to_logits(scores: np.ndarray) -> np.ndarray:
    return np.asarray(
        logit(np.clip(np.asarray(scores, np.float64), PROBABILITY_EPS, 1.0 - PROBABILITY_EPS))
    )
