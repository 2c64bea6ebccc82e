"""The one total order of a question's candidates, on which every measure and run file stands.

Knows candidates tables and scores. Must not know measures, files or models.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import EvaluationError
from as2ray.tables.schema import question_indices

TieBreaking = Literal["pessimistic", "optimistic", "by_id"]
"""What decides between equal scores: the lower relevance first, the higher first, or the id."""

RelevanceColumn = Literal["label", "grade"]
"""The column that says how relevant a candidate is."""


def validate_scores(scores: npt.ArrayLike, num_rows: int) -> npt.NDArray[np.float64]:
    """The scores as float64, shape [rows].

    Raises:
        EvaluationError: Another shape than [rows], or a score that is NaN or infinite.
    """
    values = np.asarray(scores, np.float64)
    if values.shape != (num_rows,):
        raise EvaluationError(
            f"scores of shape {list(values.shape)}; expected shape [{num_rows}], one score a row",
            fix="score every row of the table once, in its order; of two logits give one number",
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise EvaluationError(
            f"{len(bad):,} of {num_rows:,} scores are not finite, first row {bad[0]:,}: "
            f"{values[bad[0]]}"
            "; expected finite scores",
            fix="look for an overflow or a division by zero in the model's last layer",
        )
    return values


def ranking_order(
    question_index: npt.NDArray[np.integer],
    score: npt.NDArray[np.float64],
    relevance: npt.NDArray[np.integer],
    candidate_rank: npt.NDArray[np.integer] | None = None,
    ties: TieBreaking = "pessimistic",
) -> npt.NDArray[np.int64]:
    """Row numbers, question by question, best first: by score, then `ties`, then candidate id.

    Files list positives first, so a stable sort would give a constant scorer a perfect MAP;
    "pessimistic" gives it the worst that its ties allow.

    Args:
        question: Number of the row's question, shape [rows].
        score: Higher is better, finite, shape [rows].
        relevance: Label or grade, shape [rows].
        candidate: Rank of the candidate id, shape [rows]; None keeps the rows' own order.
        ties: What decides between equal scores of one question.

    Returns:
        A permutation of the rows, shape [rows].
    """
    if ties not in ("pessimistic", "optimistic", "by_id"):
        raise EvaluationError(
            f"ties {ties!r}; expected pessimistic, optimistic or by_id",
        )
    last = np.arange(len(score)) if candidate_rank is None else candidate_rank
    worth = {"pessimistic": 1, "optimistic": -1, "by_id": 0}[ties] * relevance.astype(np.int64)
    return np.lexsort((last, worth, -score, question_index))


def table_ranking_order(
    table: pa.Table,
    scores: npt.NDArray[np.float64],
    ties: TieBreaking = "pessimistic",
    relevance: RelevanceColumn = "label",
) -> npt.NDArray[np.int64]:
    """`total_order` of a candidates table, questions in their order of appearance."""
    candidate = pc.rank(table["candidate_id"], tiebreaker="dense").to_numpy()
    return ranking_order(
        question_indices(table), scores, read_relevance(table, relevance), candidate, ties
    )


def read_relevance(table: pa.Table, column: RelevanceColumn) -> npt.NDArray[np.integer]:
    """Relevance of each row, shape [rows].

    Raises:
        EvaluationError: No such column, or one with nulls.
    """
    if column not in table.column_names or table[column].null_count:
        raise EvaluationError(
            f"relevance {column!r} of a table with columns {table.column_names}"
            "; expected a column without nulls: 'label', or 'grade' where the source has it",
            fix="evaluate on the label, or read a corpus that has grades",
        )
    values: npt.NDArray[np.integer] = table[column].to_numpy()
    return values
