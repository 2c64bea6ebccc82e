"""Dropping candidates stage by stage, whatever a stage is: the layers up to an exit, or a ranker.

Knows scores and questions. Must not know encoders, heads or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from as2ray.errors import RecipeError

Drop = float | Sequence[float] | np.ndarray
"""Part of a question's candidates that goes after each stage but the last: one for all stages; one
for each; or, for each question its own, an array [questions, stages - 1]."""


class Stages(Protocol):
    """Scores what is left, one stage after the other."""

    @property
    def question(self) -> np.ndarray:
        """Number of each row's question, shape [rows]."""

    def __len__(self) -> int: ...

    def score(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """Scores of the rows that are left, shape [rows left].

        Args:
            stage: Number of the stage, from 0; stages come in order.
            rows: Their numbers, ascending: a part of those of the stage before.
        """


@dataclass(frozen=True)
class Scored:
    """What a ranker says of rows."""

    score: np.ndarray
    """Probability of being an answer, from the last stage that saw the row; float32, [rows]."""
    stage: np.ndarray | None = None
    """Number of that stage, from 0, shape [rows]; None where there is but one."""

    @property
    def rank_by(self) -> np.ndarray:
        """What sorts a question's candidates: by stage, then score; float64, shape [rows].

        A candidate that was dropped stands below all that were not, so that MAP is defined over
        the whole list (the paper leaves open where the dropped stand).
        """
        score = self.score.astype(np.float64)
        if self.stage is None:
            return score
        # A dropped one whose score rounds to 1 still stands below a survivor whose rounds to 0.
        return self.stage + np.where(score == 1.0, 1.0 - 2.0**-40, score)


def prune(stages: Stages, drop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs the stages, dropping each question's lowest candidates in between.

    Args:
        stages: What scores.
        drop: Drop ratios, shape [questions, stages - 1].

    Returns:
        Of each row the score from the last stage that saw it, float32, and that stage's number.
    """
    question = stages.question
    score = np.full(len(question), np.nan, np.float32)
    stage = np.zeros(len(question), np.int64)
    rows = np.arange(len(question))
    for number in range(len(stages)):
        score[rows] = stages.score(number, rows)
        stage[rows] = number
        if number < len(stages) - 1:
            rows = rows[survive(question[rows], score[rows], drop[:, number])]
    return score, stage


def survive(question: np.ndarray, score: np.ndarray, drop: np.ndarray) -> np.ndarray:
    """Which rows stay, bool, shape [rows]; of equal scores the earlier.

    Args:
        question: Number of each row's question, shape [rows].
        score: Shape [rows].
        drop: Drop ratio of each question, shape [questions].
    """
    order = np.lexsort((-score, question))
    sizes = np.bincount(question, minlength=len(drop))
    starts = np.cumsum(sizes) - sizes
    place = np.arange(len(question)) - starts[question[order]]
    stays = np.empty(len(question), bool)
    stays[order] = place < kept(sizes, drop)[question[order]]
    return stays


def kept(sizes: np.ndarray | int, drop: np.ndarray | float) -> np.ndarray:
    """How many of `sizes` candidates stay: k - round(drop * k), and at least one.

    128 candidates at 0.3 go 90, 63, 44, 31, as in the paper's example (section 4.3.2, whose text
    rounds down instead and then contradicts its example).
    """
    sizes = np.asarray(sizes)
    left = sizes - np.rint(np.asarray(drop) * sizes).astype(np.int64)
    stay: np.ndarray = np.maximum(left, np.minimum(sizes, 1))
    return stay


def drop_ratios(drop: Drop, stages: int, questions: int | None = None) -> np.ndarray:
    """Drop ratios as an array, shape [stages - 1], or [questions, stages - 1] if asked for.

    Raises:
        RecipeError: A ratio outside [0, 1), or another number of them.
    """
    try:
        ratios = np.asarray(drop, np.float64)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"drop ratios {drop!r}",
            expected="one number, or as many for each question",
            mend="give one drop ratio for all",
        ) from error
    if ratios.ndim == 0:
        ratios = np.full(stages - 1, ratios)
    if questions is not None and ratios.ndim < 2:
        ratios = np.tile(drop_ratios(drop, stages), (questions, 1))
    if ratios.shape != ((stages - 1,) if questions is None else (questions, stages - 1)):
        raise RecipeError(
            f"drop ratios of shape {list(ratios.shape)} for {stages} stages",
            expected=f"one number, or {stages - 1}: one after each stage but the last; for each "
            "question its own, [questions, stages - 1]",
            mend="give one drop ratio for all",
        )
    if not np.all((ratios >= 0) & (ratios < 1)):
        raise RecipeError(
            f"drop ratios {ratios.tolist()}",
            expected="numbers from 0 (drop nothing) to below 1",
            mend="lower them",
        )
    return ratios
