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

Kind = Literal["temperature", "isotonic"]
"""One number that divides the logits (Guo et al. 2017), or the best monotone map."""

EDGE = 1e-6
"""Scores this close to 0 or 1 are taken for it: their logit is infinite."""


@dataclass(frozen=True)
class Calibration:
    """A monotone map from scores to probabilities, as plain values."""

    kind: Kind
    temperature: float = 1.0
    """Divides the logits; above 1 the scores were too sure."""
    scores: tuple[float, ...] = ()
    """Of an isotonic map, ascending."""
    probabilities: tuple[float, ...] = ()
    """At these scores; straight lines between."""

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Probabilities, the shape of the scores."""
        if self.kind == "temperature":
            return np.asarray(expit(_logits(scores) / self.temperature))
        return np.asarray(np.interp(scores, self.scores, self.probabilities))

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Calibration":
        """The map whose `asdict` went through JSON."""
        lists = {name: tuple(values[name]) for name in ("scores", "probabilities")}
        return cls(**{**values, **lists})


def fit(scores: np.ndarray, labels: np.ndarray, kind: Kind = "temperature") -> Calibration:
    """The map that makes the labels of a development split most likely.

    Args:
        scores: From 0 to 1, shape [pairs].
        labels: 0 or 1, shape [pairs].
        kind: Which map.

    Raises:
        EvaluationError: Scores outside 0 to 1, labels of one kind alone, or no such map.
    """
    _check(scores, labels)
    check_both(labels)
    if kind == "temperature":
        logits, signs = _logits(scores), 2.0 * labels - 1.0
        # Smooth and with one minimum in 1 / T; searched over T from a hundredth to a hundred.
        found = minimize_scalar(
            lambda t: np.logaddexp(0.0, -signs * logits / np.exp(t)).mean(),
            bounds=(np.log(0.01), np.log(100.0)),
            method="bounded",
        )
        return Calibration("temperature", float(np.exp(found.x)))
    if kind != "isotonic":
        raise EvaluationError(
            f"calibration {kind!r}", expected=f"one of {get_args(Kind)}", mend="choose one"
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


def abstention(best: np.ndarray, right: np.ndarray, precision: float = 0.5) -> float:
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
    _check(best, right)
    check_precision(precision)
    order = np.argsort(-best, kind="stable")
    share = np.cumsum(right[order]) / np.arange(1, len(best) + 1)
    # Equal scores are given together or not at all.
    ends = np.flatnonzero(np.append(best[order][1:] != best[order][:-1], True))
    enough = ends[share[ends] >= precision]
    return float(best[order][enough[-1]]) if len(enough) else 1.0


def check_precision(precision: float) -> None:
    """Refuses a precision that no threshold reaches, or that every one does."""
    if not 0 < precision <= 1:
        raise EvaluationError(
            f"precision {precision}", expected="above 0, at most 1", mend="correct it"
        )


def check_both(labels: np.ndarray) -> None:
    """Refuses labels other than 0 and 1, or of one kind alone, on which nothing can be fitted."""
    _check_labels(labels)
    if len(np.unique(labels)) < 2:
        raise EvaluationError(
            f"{len(labels):,} labels that are all {next(iter(labels), None)}",
            expected="answers and others",
            mend="fit on a split that has both",
        )


@dataclass(frozen=True)
class Reliability:
    """How far scores are from the shares of answers among them."""

    mean_score: tuple[float, ...]
    """Of each bin that holds any."""
    share: tuple[float, ...]
    """Of answers in it."""
    pairs: tuple[int, ...]
    """In it."""
    ece: float
    """Expected calibration error: mean distance of the two, weighted by pairs."""
    brier: float
    """Mean squared distance of score and label."""


def reliability(scores: np.ndarray, labels: np.ndarray, bins: int = 15) -> Reliability:
    """Measures calibration over bins of equal width.

    Args:
        scores: From 0 to 1, shape [pairs].
        labels: 0 or 1, shape [pairs].
        bins: How many.
    """
    _check(scores, labels)
    place = np.minimum((scores * bins).astype(int), bins - 1)
    sizes = np.bincount(place, minlength=bins)
    held = sizes > 0
    mean = np.bincount(place, scores, bins)[held] / sizes[held]
    share = np.bincount(place, labels, bins)[held] / sizes[held]
    return Reliability(
        tuple(mean.tolist()),
        tuple(share.tolist()),
        tuple(sizes[held].tolist()),
        float(np.abs(mean - share) @ sizes[held] / len(scores)),
        float(np.mean((scores - labels) ** 2)),
    )


def _logits(scores: np.ndarray) -> np.ndarray:
    return np.asarray(logit(np.clip(np.asarray(scores, np.float64), EDGE, 1.0 - EDGE)))


def _check_labels(labels: np.ndarray) -> None:
    if not np.isin(labels, (0, 1)).all():
        raise EvaluationError(
            f"labels {np.unique(labels)[:4].tolist()}",
            expected="0 or 1",
            mend="map the labels to these two",
        )


def _check(scores: np.ndarray, labels: np.ndarray) -> None:
    _check_labels(labels)
    fine = len(scores) == len(labels) > 0 and np.all((scores >= 0) & (scores <= 1))
    if not fine:
        raise EvaluationError(
            f"{len(scores):,} scores from {np.min(scores, initial=np.inf):g} to "
            f"{np.max(scores, initial=-np.inf):g} and {len(labels):,} labels",
            expected="a score from 0 to 1 for every label",
            mend="give a ranker's scores, not the numbers that it ranks by",
        )
