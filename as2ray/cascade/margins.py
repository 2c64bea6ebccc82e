"""Margins that drop candidates, and the bound on what they lose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Any, Literal

import numpy as np

from as2ray.errors import ConfigError, EvaluationError

Risk = Literal["first_place", "reciprocal_rank", "top_k"]
"""What a question loses, from 0 to 1; see `question_losses`."""


@dataclass(frozen=True)
class RiskBound:
    """What is promised of margins, from how many questions, and at what cost.

    With `confidence` None the *expected* loss of a new question is at most `max_loss` (conformal
    risk control, Angelopoulos et al. 2022). With a confidence the margins are, with this
    probability over the choice of the questions, such that the mean loss is at most `max_loss`
    (Learn then Test, Angelopoulos et al. 2021). Both hold for questions that are exchangeable with
    those of the calibration: of the same kind, with candidates found in the same way.
    """

    risk: Risk
    max_loss: float
    num_questions: int
    """Questions of the calibration; none of them fitted the heads or the path of the margins."""
    mean_loss: float
    """Mean loss of these questions, with the correction for few questions not yet added."""
    relative_flops: float
    """FLOPs over these questions divided by those of the ranker without exits."""
    confidence: float | None = None
    last_exit_loss: float | None = None
    """Mean of 1 - 1 / (place that the last exit alone gives to the ranker's first) over these
    questions, if joint training or BM25 changed it; None if it is the ranker."""

    def __str__(self) -> str:
        reference = "ranker" if self.last_exit_loss is None else "last exit"
        loss = {
            "first_place": f"1 - 1 / (place of the {reference}'s first)",
            "reciprocal_rank": "the loss of reciprocal rank",
            "top_k": f"the probability of dropping one of the {reference}'s first candidates",
        }[self.risk]
        how = (
            "in expectation"
            if self.confidence is None
            else f"with {self.confidence:.0%} confidence"
        )
        change = (
            ""
            if self.last_exit_loss is None
            else "; with nothing dropped, 1 - 1 / (place of the ranker's first) was "
            f"{self.last_exit_loss:.4f}"
        )
        return (
            f"{loss} is at most {self.max_loss:g} {how}; over {self.num_questions:,} questions it "
            f"was {self.mean_loss:.4f}, for {self.relative_flops:.1%} of the ranker's operations"
            f"{change}"
        )


@dataclass(frozen=True)
class Margins:
    """Margin after each exit but the last; see `Pruning`."""

    values: tuple[float, ...]
    """In log-odds, 0 or more, finite."""
    top_k: int = 1
    """The margin lies below this many best candidates."""
    bound: RiskBound | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Margins":
        """Reads margins from `config.json`."""
        bound = settings["bound"]
        values = tuple(settings["values"])
        return cls(values, settings["top_k"], None if bound is None else RiskBound(**bound))

    def check_stages(self, num_stages: int) -> None:
        """Checks that there is a valid margin after each stage but the last.

        Raises:
            ConfigError: There is not.
        """
        if len(self.values) != num_stages - 1:
            raise ConfigError(
                f"{len(self.values)} margins for {num_stages} exits; give {num_stages - 1}: one "
                "after each exit but the last"
            )
        if not all(0 <= value < np.inf for value in self.values) or self.top_k < 1:
            raise ConfigError(
                f"margins {list(self.values)} with top_k={self.top_k}: margins are finite numbers "
                "from 0, and top_k is 1 or more"
            )


def min_questions(max_loss: float, confidence: float | None = None) -> int:
    """Returns how many questions a bound needs at least, even if none of them loses anything."""
    if confidence is None:
        return max(1, ceil(1.0 / max_loss - 1.0 - 1e-9))
    return ceil(log(1.0 - confidence) / log(1.0 - max_loss) - 1e-9)


def check_num_questions(num_questions: int, max_loss: float, confidence: float | None) -> None:
    """Checks that there are enough questions for a bound.

    Raises:
        EvaluationError: There are not.
    """
    needed = min_questions(max_loss, confidence)
    if num_questions < needed:
        lowest = _lowest_max_loss(num_questions, confidence)
        raise EvaluationError(
            f"a bound of {max_loss:g} on the loss needs {needed:,} questions with two or more "
            f"candidates for the calibration, but there are {num_questions:,}",
            fix="give more questions, or a bound (`max_loss`, or 1 - `at_least`) of at least "
            f"{lowest:.4f}",
        )


def _lowest_max_loss(num_questions: int, confidence: float | None) -> float:
    if confidence is None:
        return 1.0 / (num_questions + 1)
    return float(1.0 - (1.0 - confidence) ** (1.0 / max(num_questions, 1)))


def select_step(
    losses: Sequence[np.ndarray] | np.ndarray, max_loss: float, confidence: float | None = None
) -> int:
    """Returns the last step of a path whose bound on the loss holds.

    Args:
        losses: Loss of each question at each step, from 0 to 1, shape [steps, questions]. The first
            step drops nothing. Losses are made monotone by their running maximum over the steps.
        max_loss: Bound on the mean loss, above 0.
        confidence: None for conformal risk control, (sum + 1) / (questions + 1) <= `max_loss`;
            otherwise for Learn then Test with the p-value of Hoeffding and Bentkus.

    Raises:
        EvaluationError: Too few questions.
    """
    monotone = np.maximum.accumulate(np.asarray(losses), axis=0)
    num_questions = monotone.shape[1]
    check_num_questions(num_questions, max_loss, confidence)
    if confidence is None:
        holds = (monotone.sum(1) + 1.0) / (num_questions + 1) <= max_loss + 1e-12
    else:
        means = monotone.mean(1)
        p_values = np.array([_p_value(mean, num_questions, max_loss) for mean in means])
        holds = p_values <= 1.0 - confidence + 1e-12
    return int(np.flatnonzero(np.logical_and.accumulate(holds))[-1])


def _p_value(mean_loss: float, num_questions: int, max_loss: float) -> float:
    """Returns the p-value of the hypothesis that the expected loss exceeds `max_loss`."""
    # Recipes name margins, and are read without scipy.
    from scipy.special import bdtr, rel_entr

    mean = min(mean_loss, max_loss)
    # The Kullback-Leibler divergence of two coins.
    divergence = rel_entr(mean, max_loss) + rel_entr(1 - mean, 1 - max_loss)
    hoeffding = np.exp(-num_questions * divergence)
    bentkus = np.e * bdtr(ceil(num_questions * mean_loss - 1e-9), num_questions, max_loss)
    return float(min(hoeffding, bentkus))
