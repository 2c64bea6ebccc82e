"""Calibration of scores to probabilities, fitted on a development split.

Fine-tuned rankers order well but are overconfident. A calibration maps a score to the share of
candidates with that score that are answers. It never changes a ranking: isotonic regression creates
ties, so candidates are sorted before they are calibrated.
"""

from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, PositiveFloat
from pydantic.dataclasses import dataclass
from scipy.special import expit, logit

from as2ray.errors import validate_arguments
from as2ray.models.reliability_svg import reliability_svg
from as2ray.tables.reliability import FEW_QUESTIONS, Abstention, Reliability
from as2ray.tables.score_checks import check_binary_labels, check_probabilities

CalibrationMethod = Literal["temperature", "isotonic"]
"""A temperature that divides the logits (Guo et al. 2017), or isotonic regression."""

MinPrecision = Annotated[float, Field(gt=0, le=1)]
"""Minimum share of correct answers among those that are given."""

PROBABILITY_EPS = 1e-6
"""Distance from 0 and 1 to which scores are clipped, because their logits would be infinite."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Calibration:
    """A monotone map from scores to probabilities, as plain values."""

    method: CalibrationMethod
    temperature: PositiveFloat = 1.0
    """Divides the logits; above 1 if the scores were overconfident."""
    score_knots: tuple[float, ...] = ()
    """Scores at which an isotonic map is defined, ascending; it is linear in between."""
    probability_knots: tuple[float, ...] = ()
    """Probabilities at these scores."""

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Returns probabilities, in the shape of the scores."""
        if self.method == "temperature":
            return np.asarray(expit(_to_logits(scores) / self.temperature))
        return np.asarray(np.interp(scores, self.score_knots, self.probability_knots))


UNCHANGED = Calibration("temperature")
"""The calibration that leaves scores as they are."""


class CalibrationResult(NamedTuple):
    """What a calibration of a ranker achieves on questions that it was not fitted on."""

    before: tuple[Reliability, ...]
    """Of the scores of each stage."""
    after: tuple[Reliability, ...]
    """Of the calibrated scores of each stage; where the error grows, they are not used."""
    abstention: Abstention
    """Of the first candidate of each question."""
    stage_names: tuple[str, ...]
    """Name of each stage, such as `exit_4`; "" for a ranker without exits."""
    num_questions: int
    """Number of questions that it was fitted on."""

    def __repr__(self) -> str:
        stages = zip(self.stage_names, self._describe_stages())
        lines = [f"{name}: {text}".removeprefix(": ") for name, text in stages]
        return "\n".join([*lines, self._describe_abstention()])

    def _repr_html_(self) -> str:
        """Returns the errors of each stage, and a picture of its reliability before and after."""
        stages = zip(self.stage_names, self._describe_stages(), self.before, self.after)
        rows = "".join(
            f"<tr><td>{name}</td><td>{text}</td><td>{reliability_svg(before, after)}</td></tr>"
            for name, text, before, after in stages
        )
        head = "<tr><th>exit</th><th>errors</th><th>answers by score: before gray, after blue</th>"
        return f"<table>{head}</tr>{rows}</table><p>{self._describe_abstention()}</p>"

    def _describe_stages(self) -> list[str]:
        return [
            f"calibration error {before.ece:.4f} before, {after.ece:.4f} after; "
            f"Brier {before.brier:.4f} and {after.brier:.4f}"
            + ("; scores stay as they were" if after.ece > before.ece else "")
            for before, after in zip(self.before, self.after)
        ]

    def _describe_abstention(self) -> str:
        wrong_share = 1 - self.abstention.precision_at(1.0)
        threshold = self.abstention.threshold
        rule = "no threshold is stored" if threshold is None else f"abstains below {threshold:.4f}"
        share = f"the first answer is wrong for {wrong_share:.1%} of the questions; {rule}"
        return "; ".join(filter(None, [share, self.explain_few()]))

    def explain_few(self) -> str | None:
        """Returns that the questions are few; None if they are not."""
        if self.num_questions >= FEW_QUESTIONS:
            return None
        return f"{self.num_questions} questions are few: calibration and threshold are rough"


@validate_arguments
def fit_calibration(
    scores: np.ndarray, labels: np.ndarray, method: CalibrationMethod = "temperature"
) -> Calibration:
    """Fits the calibration that maximizes the likelihood of labels (isotonic: least squares).

    Args:
        scores: Scores from 0 to 1, shape [pairs].
        labels: 0 or 1, shape [pairs].
        method: Kind of calibration.

    Raises:
        EvaluationError: Scores outside 0 to 1, other labels, or labels that are all equal.
        ConfigError: An unknown method.
    """
    from scipy.optimize import minimize_scalar  # Loading it takes 0.5 s.

    check_probabilities(scores, labels)
    check_binary_labels(labels)
    if method == "isotonic":
        return fit_isotonic(scores, labels)
    logits, signs = _to_logits(scores), 2.0 * labels - 1.0
    # The loss is smooth and has one minimum in 1 / T.
    minimum = minimize_scalar(
        lambda log_t: np.logaddexp(0.0, -signs * logits / np.exp(log_t)).mean(),
        bounds=(np.log(0.01), np.log(100.0)),
        method="bounded",
    )
    return Calibration("temperature", float(np.exp(minimum.x)))


def fit_isotonic(scores: np.ndarray, probabilities: np.ndarray) -> Calibration:
    """Fits the monotone map from scores to probabilities with the least squared error.

    Args:
        scores: Scores from 0 to 1, shape [pairs].
        probabilities: What they should become: labels, or another ranker's probabilities; [pairs].
    """
    from scipy.optimize import isotonic_regression

    values, value_index = np.unique(scores, return_inverse=True)
    counts = np.bincount(value_index)
    means = np.bincount(value_index, probabilities) / counts
    fitted = isotonic_regression(means, weights=counts).x
    # The ends of each constant level define the map.
    level_starts = np.flatnonzero(np.diff(fitted, prepend=np.nan, append=np.nan) != 0)
    knots = np.unique(np.concatenate([level_starts, level_starts - 1]))
    knots = knots[(knots >= 0) & (knots < len(values))]
    score_knots, probability_knots = (tuple(array[knots].tolist()) for array in (values, fitted))
    return Calibration("isotonic", 1.0, score_knots, probability_knots)


def cross_fit(
    scores: np.ndarray, labels: np.ndarray, folds: np.ndarray, method: CalibrationMethod
) -> np.ndarray:
    """Returns the scores of each fold, calibrated on the other folds, shape [pairs].

    A fold whose complement has equal labels keeps its scores.

    Args:
        scores: See `fit_calibration`.
        labels: See `fit_calibration`.
        folds: Fold of each pair; the pairs of a question belong to one fold, shape [pairs].
        method: Kind of calibration.
    """
    calibrated = np.array(scores, np.float64)
    for fold in np.unique(folds):
        is_held_out = folds == fold
        train_labels = labels[~is_held_out]
        if len(np.unique(train_labels)) == 2:
            calibration = fit_calibration(scores[~is_held_out], train_labels, method)
            calibrated[is_held_out] = calibration(scores[is_held_out])
    return calibrated


def _to_logits(scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    return np.asarray(logit(np.clip(scores, PROBABILITY_EPS, 1.0 - PROBABILITY_EPS)))
