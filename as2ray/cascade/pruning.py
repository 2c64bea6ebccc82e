"""Dropping candidates stage by stage, whatever a stage is: the layers up to an exit, or a ranker.

Knows scores and questions. Must not know encoders, heads or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from as2ray.errors import ConfigError

DropRatios = float | Sequence[float] | np.ndarray
"""Part of a question's candidates that goes after each stage but the last: one for all stages; one
for each; or, for each question its own, an array [questions, stages - 1]."""


class StageScorer(Protocol):
    """Scores what is left, one stage after the other."""

    @property
    def question_index(self) -> np.ndarray:
        """Number of each row's question, shape [rows]."""

    def __len__(self) -> int: ...

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """Scores of the rows that are left, shape [rows left].

        Args:
            stage: Number of the stage, from 0; stages come in order.
            rows: Their numbers, ascending: a part of those of the stage before.
        """


@dataclass(frozen=True)
class StagedScores:
    """What a ranker says of rows."""

    scores: np.ndarray
    """Probability of being an answer, from the last stage that saw the row; float32, [rows]."""
    stage_index: np.ndarray | None = None
    """Number of that stage, from 0, shape [rows]; None where there is but one."""

    @property
    def sort_keys(self) -> np.ndarray:
        """What sorts a question's candidates: by stage, then score; float64, shape [rows].

        A candidate that was dropped stands below all that were not, so that MAP is defined over
        the whole list (the paper leaves open where the dropped stand).
        """
        score = self.scores.astype(np.float64)
        if self.stage_index is None:
            return score
        # A dropped one whose score rounds to 1 still stands below a survivor whose rounds to 0.
        return self.stage_index + np.where(score == 1.0, 1.0 - 2.0**-40, score)


def prune(scorer: StageScorer, drop_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs the stages, dropping each question's lowest candidates in between.

    Args:
        stages: What scores.
        drop: Drop ratios, shape [questions, stages - 1].

    Returns:
        Of each row the score from the last stage that saw it, float32, and that stage's number.
    """
    question = scorer.question_index
    score = np.full(len(question), np.nan, np.float32)
    stage = np.zeros(len(question), np.int64)
    rows = np.arange(len(question))
    for number in range(len(scorer)):
        score[rows] = scorer.score(number, rows)
        stage[rows] = number
        if number < len(scorer) - 1:
            rows = rows[survivor_mask(question[rows], score[rows], drop_ratios[:, number])]
    return score, stage


def survivor_mask(
    question_index: np.ndarray, scores: np.ndarray, drop_ratios: np.ndarray
) -> np.ndarray:
    """Which rows stay, bool, shape [rows]; of equal scores the earlier.

    Args:
        question: Number of each row's question, shape [rows].
        score: Shape [rows].
        drop: Drop ratio of each question, shape [questions].
    """
    order = np.lexsort((-scores, question_index))
    sizes = np.bincount(question_index, minlength=len(drop_ratios))
    starts = np.cumsum(sizes) - sizes
    place = np.arange(len(question_index)) - starts[question_index[order]]
    stays = np.empty(len(question_index), bool)
    stays[order] = place < num_kept(sizes, drop_ratios)[question_index[order]]
    return stays


def num_kept(sizes: np.ndarray | int, drop_ratios: np.ndarray | float) -> np.ndarray:
    """How many of `sizes` candidates stay: k - round(drop * k), and at least one.

    128 candidates at 0.3 go 90, 63, 44, 31, as in the paper's example (section 4.3.2, whose text
    rounds down instead and then contradicts its example).
    """
    sizes = np.asarray(sizes)
    left = sizes - np.rint(np.asarray(drop_ratios) * sizes).astype(np.int64)
    stay: np.ndarray = np.maximum(left, np.minimum(sizes, 1))
    return stay


def expand_drop_ratios(
    drop_ratios: DropRatios, num_stages: int, num_questions: int | None = None
) -> np.ndarray:
    """Drop ratios as an array, shape [stages - 1], or [questions, stages - 1] if asked for.

    Raises:
        RecipeError: A ratio outside [0, 1), or another number of them.
    """
    try:
        ratios = np.asarray(drop_ratios, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"drop ratios {drop_ratios!r}; expected one number, or as many for each question",
            fix="give one drop ratio for all",
        ) from error
    if ratios.ndim == 0:
        ratios = np.full(num_stages - 1, ratios)
    if num_questions is not None and ratios.ndim < 2:
        ratios = np.tile(expand_drop_ratios(drop_ratios, num_stages), (num_questions, 1))
    if ratios.shape != (
        (num_stages - 1,) if num_questions is None else (num_questions, num_stages - 1)
    ):
        raise ConfigError(
            f"drop ratios of shape {list(ratios.shape)} for {num_stages} stages"
            f"; expected one number, or {num_stages - 1}: one after each stage but the last; for each "
            "question its own, [questions, stages - 1]",
            fix="give one drop ratio for all",
        )
    if not np.all((ratios >= 0) & (ratios < 1)):
        raise ConfigError(
            f"drop ratios {ratios.tolist()}; expected numbers from 0 (drop nothing) to below 1",
        )
    return ratios
