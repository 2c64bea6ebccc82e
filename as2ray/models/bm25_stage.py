"""BM25 in a cascade: it drops candidates before the first layer, and adds to the exits' scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from as2ray.cascade.pruning import StagedScores, StageScorer, log_odds, lower_scores, margin_mask
from as2ray.cascade.time_plan import NOT_SCORED
from as2ray.errors import ConfigError

UNSCORED_SCALE = np.float32(1e-6)
"""Scores of candidates that leave before the first layer are below it, in the order of BM25."""


@dataclass(frozen=True)
class BM25Selection:
    """Which candidates enter the first layer."""

    enters: np.ndarray
    """Bool, shape [rows]."""
    scores: np.ndarray
    """Scores of those that do not; float32, shape [rows]."""
    gaps: np.ndarray
    """How far the log-odds of BM25 lie below the best of the question, 0 or more, shape [rows]."""
    has_bm25: np.ndarray
    """Whether BM25 has a part in ranking the row's question, bool, shape [rows]."""

    def complete(self, entered: StagedScores) -> StagedScores:
        """Returns the scores of all rows, given those of the rows that entered."""
        scores = self.scores.copy()
        stage_index = np.full(len(scores), NOT_SCORED)
        scores[self.enters], stage_index[self.enters] = entered.scores, entered.stage_index
        return StagedScores(scores, stage_index, has_bm25=self.has_bm25)


def check_bm25_weights(weights: Sequence[float], num_stages: int) -> None:
    """Checks that there is a valid weight for each stage; that of the last may be left out.

    Raises:
        ConfigError: There is not.
    """
    if len(weights) not in (num_stages - 1, num_stages):
        raise ConfigError(
            f"{len(weights)} weights of BM25 for {num_stages} exits; give one for each exit, or "
            "for each but the last"
        )
    if not all(0 <= weight < np.inf for weight in weights):
        raise ConfigError(f"weights of BM25 {list(weights)} are not all finite numbers from 0")


def enter_all(num_rows: int) -> BM25Selection:
    """Returns the selection of all rows, without a part of BM25."""
    return BM25Selection(
        enters=np.ones(num_rows, bool),
        scores=np.zeros(num_rows, np.float32),
        gaps=np.zeros(num_rows),
        has_bm25=np.zeros(num_rows, bool),
    )


def join_selections(selections: Sequence[BM25Selection]) -> BM25Selection:
    """Returns the selection of the rows of several questions, one after the other."""
    return BM25Selection(
        np.concatenate([selection.enters for selection in selections]),
        np.concatenate([selection.scores for selection in selections]),
        np.concatenate([selection.gaps for selection in selections]),
        np.concatenate([selection.has_bm25 for selection in selections]),
    )


def select_by_bm25(
    question: str, candidates: Sequence[str], margin: float, top_k: int = 1
) -> BM25Selection:
    """Selects the candidates of one question.

    Args:
        question: The question.
        candidates: Its candidates.
        margin: How far their log-odds, of `list_probabilities`, may lie below the `top_k`-th best.
        top_k: See `Pruning`.
    """
    from as2ray.text.bm25 import list_probabilities  # bm25s and scipy are loaded when needed

    if not candidates:
        return enter_all(0)
    probabilities = list_probabilities(question, candidates)
    rows = np.zeros(len(candidates), np.int64)
    enters = margin_mask(rows, probabilities, np.array([margin]), top_k)
    values = log_odds(probabilities)
    gaps = values.max() - values
    return BM25Selection(enters, UNSCORED_SCALE * probabilities, gaps, np.ones(len(rows), bool))


@dataclass(frozen=True)
class BM25Scorer:
    """Stages whose scores are lowered by what a candidate lies behind the question's best BM25."""

    scorer: StageScorer
    gaps: np.ndarray
    """See `BM25Selection`."""
    weights: Sequence[float]
    """Weight of the gap in the log-odds of each stage."""

    @property
    def question_index(self) -> np.ndarray:
        """See `StageScorer`."""
        return self.scorer.question_index

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """See `StageScorer`."""
        scores = self.scorer.score(stage_index, rows)
        weight = self.weights[stage_index]
        return lower_scores(scores, weight * self.gaps[rows]) if weight else scores
