"""The one total order of a question's candidates, on which every measure and run file stands.

Knows candidates tables and scores. Must not know measures, files or models.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import EvaluationError
from as2ray.records import question_numbers

Ties = Literal["pessimistic", "optimistic", "by_id"]
"""What decides between equal scores: the lower relevance first, the higher first, or the id."""

Relevance = Literal["label", "grade"]
"""The column that says how relevant a candidate is."""


def checked_scores(scores: npt.ArrayLike, rows: int) -> npt.NDArray[np.float64]:
    """The scores as float64, shape [rows].

    Raises:
        EvaluationError: Another shape than [rows], or a score that is NaN or infinite.
    """
    values = np.asarray(scores, np.float64)
    if values.shape != (rows,):
        raise EvaluationError(
            f"scores of shape {list(values.shape)}",
            expected=f"shape [{rows}], one score a row",
            mend="score every row of the table once, in its order; of two logits give one number",
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise EvaluationError(
            f"{len(bad):,} of {rows:,} scores are not finite, first row {bad[0]:,}: "
            f"{values[bad[0]]}",
            expected="finite scores",
            mend="look for an overflow or a division by zero in the model's last layer",
        )
    return values


def total_order(
    question: npt.NDArray[np.integer],
    score: npt.NDArray[np.float64],
    relevance: npt.NDArray[np.integer],
    candidate: npt.NDArray[np.integer] | None = None,
    ties: Ties = "pessimistic",
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
            f"ties {ties!r}", expected="pessimistic, optimistic or by_id", mend="name one of them"
        )
    last = np.arange(len(score)) if candidate is None else candidate
    worth = {"pessimistic": 1, "optimistic": -1, "by_id": 0}[ties] * relevance.astype(np.int64)
    return np.lexsort((last, worth, -score, question))


def order_of(
    table: pa.Table,
    scores: npt.NDArray[np.float64],
    ties: Ties = "pessimistic",
    relevance: Relevance = "label",
) -> npt.NDArray[np.int64]:
    """`total_order` of a candidates table, questions in their order of appearance."""
    candidate = pc.rank(table["candidate_id"], tiebreaker="dense").to_numpy()
    return total_order(
        question_numbers(table), scores, relevance_of(table, relevance), candidate, ties
    )


def relevance_of(table: pa.Table, column: Relevance) -> npt.NDArray[np.integer]:
    """Relevance of each row, shape [rows].

    Raises:
        EvaluationError: No such column, or one with nulls.
    """
    if column not in table.column_names or table[column].null_count:
        raise EvaluationError(
            f"relevance {column!r} of a table with columns {table.column_names}",
            expected="a column without nulls: 'label', or 'grade' where the source has it",
            mend="evaluate on the label, or read a corpus that has grades",
        )
    values: npt.NDArray[np.integer] = table[column].to_numpy()
    return values
