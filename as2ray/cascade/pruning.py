"""Drops candidates between the stages of a ranker and combines the scores of all stages.

A stage is the layers up to an exit of a cascade, or one ranker of a sequence of rankers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from as2ray.errors import ConfigError

DropRatios = float | Sequence[float] | np.ndarray
"""Share of a question's candidates that is dropped after each stage but the last.

One number for all stages, one per stage, or an array [questions, stages - 1].
`expand_drop_ratios` turns it into an array, which all other functions take.
"""

Rounding = Literal["floor", "nearest"]
"""How many candidates a drop ratio drops: its share rounded down (the paper's text, section 4.3.2),
or to the nearest number (the paper's example)."""


@dataclass(frozen=True)
class Pruning:
    """Which candidates are dropped after each stage but the last: by rank, by margin, or by both.

    By margin, a candidate is dropped if its score lies more than the margin below the `top_k`-th
    best of its question at that stage, both as log-odds. Easy questions then lose nearly all
    candidates early, and hard ones few. Ranks alone drop the same share of every question.
    """

    drop_ratios: np.ndarray
    """Shape [questions, stages - 1]; 0 drops nothing."""
    margins: np.ndarray
    """Shape [questions, stages - 1]; infinity drops nothing."""
    top_k: int = 1
    rounding: Rounding = "floor"

    @classmethod
    def by_rank(cls, drop_ratios: np.ndarray, rounding: Rounding = "floor") -> "Pruning":
        """Drops by ratios alone."""
        return cls(drop_ratios, np.full(drop_ratios.shape, np.inf), rounding=rounding)

    @property
    def drops_nothing(self) -> bool:
        """Whether every candidate reaches the last stage, whatever its scores."""
        return not self.drop_ratios.any() and bool(np.isinf(self.margins).all())

    def select(self, questions: np.ndarray) -> "Pruning":
        """Returns the pruning of some questions, shape [n]."""
        return replace(
            self, drop_ratios=self.drop_ratios[questions], margins=self.margins[questions]
        )

    def survivor_mask(
        self, stage_index: int, question_index: np.ndarray, scores: np.ndarray
    ) -> np.ndarray:
        """Returns which rows are not dropped after a stage, bool, shape [rows]."""
        ratios, margins = self.drop_ratios[:, stage_index], self.margins[:, stage_index]
        survives = survivor_mask(question_index, scores, ratios, self.rounding)
        if np.isfinite(margins).any():
            survives &= margin_mask(question_index, scores, margins, self.top_k)
        return survives


def concatenate_prunings(prunings: Sequence[Pruning]) -> Pruning:
    """Joins what is dropped of several groups of questions of one ranker, in order."""
    return replace(
        prunings[0],
        drop_ratios=np.concatenate([pruning.drop_ratios for pruning in prunings]),
        margins=np.concatenate([pruning.margins for pruning in prunings]),
        # Those by rank have no margins that it would change.
        top_k=max(pruning.top_k for pruning in prunings),
    )


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
    logits: np.ndarray | None = None
    """Logits of the scores, float32, [rows], from a ranker of one stage that shows them: a score
    near 1 would tell them less exactly."""
    has_bm25: np.ndarray | None = None
    """Whether BM25 has a part in the score, bool, shape [rows]; None if it has in none."""

    def select(self, rows: slice) -> "StagedScores":
        """Returns the scores of some rows."""
        others = (self.stage_index, self.logits, self.has_bm25)
        parts = [None if values is None else values[rows] for values in others]
        return StagedScores(self.scores[rows], *parts)

    @property
    def sort_keys(self) -> np.ndarray:
        """Keys that sort a question's candidates by stage, then score; float64, shape [rows].

        A dropped candidate ranks below all that were not dropped, so that MAP is defined over the
        whole list. The paper does not say where dropped candidates rank.
        """
        if self.stage_index is None:
            return (self.scores if self.logits is None else self.logits).astype(np.float64)
        scores = self.scores.astype(np.float64)
        # A score that rounds to 1 must stay below the score 0 of the next stage.
        return self.stage_index + np.where(scores == 1.0, 1.0 - 2.0**-40, scores)


def concatenate_scores(parts: Sequence[StagedScores], rows: np.ndarray) -> StagedScores:
    """Joins the scores of groups of rows of one ranker.

    Args:
        parts: Scores of each group.
        rows: Row of each score, group by group: all rows once.
    """
    order = np.argsort(rows)

    def join(values: Sequence[np.ndarray | None]) -> np.ndarray | None:
        known = [part for part in values if part is not None]
        return np.concatenate(known)[order] if known else None

    return StagedScores(
        np.concatenate([part.scores for part in parts])[order],
        join([part.stage_index for part in parts]),
        join([part.logits for part in parts]),
        join([part.has_bm25 for part in parts]),
    )


def prune(scorer: StageScorer, pruning: Pruning) -> tuple[np.ndarray, np.ndarray]:
    """Runs all stages and drops candidates of each question after each stage but the last.

    Args:
        scorer: Scores the rows.
        pruning: What is dropped.

    Returns:
        For each row the score from the last stage that scored it, float32, and the number of that
        stage, int64.
    """
    question_index = scorer.question_index
    scores = np.full(len(question_index), np.nan, np.float32)
    stage_index = np.zeros(len(question_index), np.int64)
    rows = np.arange(len(question_index))
    num_stages = pruning.drop_ratios.shape[1] + 1
    for stage in range(num_stages):
        scores[rows] = scorer.score(stage, rows)
        stage_index[rows] = stage
        if stage < num_stages - 1:
            rows = rows[pruning.survivor_mask(stage, question_index[rows], scores[rows])]
    return scores, stage_index


def survivor_mask(
    question_index: np.ndarray,
    scores: np.ndarray,
    drop_ratios: np.ndarray,
    rounding: Rounding = "floor",
) -> np.ndarray:
    """Returns which rows are not dropped, bool, shape [rows]; of equal scores the first rows.

    Args:
        question_index: Number of each row's question, shape [rows].
        scores: Shape [rows].
        drop_ratios: Drop ratio of each question, shape [questions].
        rounding: See `num_kept`.
    """
    order, starts, sizes = _order_by_question(question_index, scores, len(drop_ratios))
    rank = np.arange(len(question_index)) - starts[question_index[order]]
    kept = num_kept(sizes, drop_ratios, rounding)
    survives = np.empty(len(question_index), bool)
    survives[order] = rank < kept[question_index[order]]
    return survives


def margin_mask(
    question_index: np.ndarray, scores: np.ndarray, margins: np.ndarray, top_k: int
) -> np.ndarray:
    """Returns which rows lie within the margin of their question's `top_k`-th best, bool, [rows].

    Args:
        question_index: Number of each row's question, shape [rows].
        scores: Probabilities, shape [rows].
        margins: Margin of each question in log-odds, shape [questions].
        top_k: Rank of the candidate below which the margin lies, from 1; of fewer candidates the
            last.
    """
    values = log_odds(scores)
    if top_k == 1:
        limits = np.full(len(margins), -np.inf)
        np.fmax.at(limits, question_index, values)
        return np.asarray(~(values < (limits - margins)[question_index]))
    order, starts, sizes = _order_by_question(question_index, scores, len(margins))
    # A question without rows has no best; its limit is not read.
    best = starts + np.minimum(top_k, np.maximum(sizes, 1)) - 1
    limits = np.empty(len(margins))
    limits[sizes > 0] = values[order[best[sizes > 0]]] - margins[sizes > 0]
    within: np.ndarray = ~(values < limits[question_index])
    return within


def log_odds(scores: np.ndarray) -> np.ndarray:
    """Returns the log-odds of float32 probabilities, finite; float64, shape [...]."""
    # A score of 1 is above the highest float32 below 1.
    limits = float(np.finfo(np.float32).tiny), 1.0 - float(np.finfo(np.float32).epsneg) / 2
    probabilities = np.clip(scores.astype(np.float64), *limits)
    return np.asarray(np.log(probabilities) - np.log1p(-probabilities))


def lower_scores(scores: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Returns float32 probabilities whose log-odds are lower by some amounts, shape [rows]."""
    return np.asarray(1.0 / (1.0 + np.exp(by - log_odds(scores))), np.float32)


def _order_by_question(
    question_index: np.ndarray, scores: np.ndarray, num_questions: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rows by question, best first; the start of each question in them; and its size."""
    sizes = np.bincount(question_index, minlength=num_questions)
    return np.lexsort((-scores, question_index)), np.cumsum(sizes) - sizes, sizes


def num_kept(
    sizes: np.ndarray | int, drop_ratios: np.ndarray | float, rounding: Rounding = "floor"
) -> np.ndarray:
    """Returns how many of k candidates are not dropped, at least one.

    Dropped are floor(ratio * k), as the paper says (section 4.3.2), or the nearest number: 128
    candidates at 0.3 then become 90, 63, 44, 31 as in the paper's example, instead of 90, 63, 45,
    32. Nearest drops more of a short list: of 10 at 0.3 two reach the fifth stage instead of three.
    """
    sizes = np.asarray(sizes)
    dropped = np.asarray(drop_ratios) * sizes
    # 0.29 * 100 is 28.999..., of which the floor is not 29.
    dropped = np.floor(dropped + 1e-9) if rounding == "floor" else np.rint(dropped)
    return np.asarray(np.maximum(sizes - dropped.astype(np.int64), np.minimum(sizes, 1)))


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
    problem = f"drop ratios {drop_ratios!r} are neither a number nor a list of numbers"
    try:
        ratios = np.asarray(drop_ratios)
    except (TypeError, ValueError) as error:
        raise ConfigError(problem) from error
    if ratios.dtype.kind not in "iuf":  # numpy would read the text "0.5" as a number
        raise ConfigError(problem)
    ratios = ratios.astype(np.float64)
    if not np.all((ratios >= 0) & (ratios < 1)):
        raise ConfigError(f"drop ratios {ratios.tolist()} must be at least 0 and below 1")
    shape = (num_stages - 1,) if num_questions is None else (num_questions, num_stages - 1)
    if ratios.shape in ((), shape[-1:]):
        ratios = np.array(np.broadcast_to(ratios, shape))
    if ratios.shape != shape:
        raise ConfigError(
            f"drop ratios of shape {list(ratios.shape)} for {num_stages} stages; give one number, "
            f"or {num_stages - 1}: one after each stage but the last"
        )
    return ratios
