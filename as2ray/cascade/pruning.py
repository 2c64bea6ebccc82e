"""Drops candidates between the stages of a ranker and combines the scores of all stages.

A stage is the layers up to an exit of a cascade, or one ranker of a sequence of rankers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from as2ray.errors import ConfigError

DropRatios = float | Sequence[float] | np.ndarray
"""Share of a question's candidates that is dropped after each stage but the last.

One number for all stages, one per stage, or an array [questions, stages - 1].
`expand_drop_ratios` turns it into an array, which all other functions take.
"""


class StageScorer(Protocol):
    """Scores the remaining rows, stage by stage."""

    @property
    def question_index(self) -> np.ndarray:
        """Number of each row's question, shape [rows]."""

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """Scores the remaining rows, shape [remaining rows].

        Args:
            stage_index: Number of the stage, from 0; stages are called in order.
            rows: Row numbers, ascending: a subset of those of the previous stage.
        """


@dataclass(frozen=True)
class StagedScores:
    """Scores of rows, and the stage from which each score is."""

    scores: np.ndarray
    """Probability of being an answer, from the last stage that scored the row; float32, [rows]."""
    stage_index: np.ndarray | None = None
    """Number of that stage, from 0, shape [rows]; None for a ranker with one stage."""

    @property
    def sort_keys(self) -> np.ndarray:
        """Keys that sort a question's candidates by stage, then score; float64, shape [rows].

        A dropped candidate ranks below all that were not dropped, so that MAP is defined over the
        whole list. The paper does not say where dropped candidates rank.
        """
        scores = self.scores.astype(np.float64)
        if self.stage_index is None:
            return scores
        # A score that rounds to 1 must stay below the score 0 of the next stage.
        return self.stage_index + np.where(scores == 1.0, 1.0 - 2.0**-40, scores)


def prune(scorer: StageScorer, drop_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs all stages and drops each question's lowest candidates after each stage but the last.

    Args:
        scorer: Scores the rows.
        drop_ratios: Shape [questions, stages - 1].

    Returns:
        For each row the score from the last stage that scored it, float32, and the number of that
        stage, int64.
    """
    question_index = scorer.question_index
    scores = np.full(len(question_index), np.nan, np.float32)
    stage_index = np.zeros(len(question_index), np.int64)
    rows = np.arange(len(question_index))
    num_stages = drop_ratios.shape[1] + 1
    for stage in range(num_stages):
        scores[rows] = scorer.score(stage, rows)
        stage_index[rows] = stage
        if stage < num_stages - 1:
            rows = rows[survivor_mask(question_index[rows], scores[rows], drop_ratios[:, stage])]
    return scores, stage_index


def survivor_mask(
    question_index: np.ndarray, scores: np.ndarray, drop_ratios: np.ndarray
) -> np.ndarray:
    """Returns which rows are not dropped, bool, shape [rows]; of equal scores the first rows.

    Args:
        question_index: Number of each row's question, shape [rows].
        scores: Shape [rows].
        drop_ratios: Drop ratio of each question, shape [questions].
    """
    order = np.lexsort((-scores, question_index))
    sizes = np.bincount(question_index, minlength=len(drop_ratios))
    starts = np.cumsum(sizes) - sizes
    rank = np.arange(len(question_index)) - starts[question_index[order]]
    survives = np.empty(len(question_index), bool)
    survives[order] = rank < num_kept(sizes, drop_ratios)[question_index[order]]
    return survives


def num_kept(sizes: np.ndarray | int, drop_ratios: np.ndarray | float) -> np.ndarray:
    """Returns how many of k candidates are not dropped: k - round(ratio * k), at least one.

    128 candidates at 0.3 become 90, 63, 44, 31, as in the paper's example (section 4.3.2). The text
    of the paper says that it rounds down, which contradicts its example.
    """
    sizes = np.asarray(sizes)
    remaining = sizes - np.rint(np.asarray(drop_ratios) * sizes).astype(np.int64)
    return np.asarray(np.maximum(remaining, np.minimum(sizes, 1)))


def expand_drop_ratios(
    drop_ratios: DropRatios, num_stages: int, num_questions: int | None = None
) -> np.ndarray:
    """Returns drop ratios as an array [stages - 1], or [questions, stages - 1].

    Args:
        drop_ratios: One number, one per stage but the last, or an array of the returned shape.
        num_stages: Stages of the ranker.
        num_questions: Number of questions of the array; None for an array without questions.

    Raises:
        ConfigError: A ratio outside [0, 1), or the wrong number of ratios.
    """
    try:
        ratios = np.asarray(drop_ratios, np.float64)
    except (TypeError, ValueError) as error:
        problem = f"drop ratios {drop_ratios!r} are neither a number nor a list of numbers"
        raise ConfigError(problem) from error
    shape = (num_stages - 1,) if num_questions is None else (num_questions, num_stages - 1)
    if ratios.shape in ((), shape[-1:]):
        ratios = np.array(np.broadcast_to(ratios, shape))
    if ratios.shape != shape:
        raise ConfigError(
            f"drop ratios of shape {list(ratios.shape)} for {num_stages} stages; give one number, "
            f"or {num_stages - 1}: one after each stage but the last"
        )
    if not np.all((ratios >= 0) & (ratios < 1)):
        raise ConfigError(f"drop ratios {ratios.tolist()} must be at least 0 and below 1")
    return ratios
