"""The total order of a question's candidates that all measures and run files use."""

from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import EvaluationError, lookup
from as2ray.tables.schema import question_indices

TieBreaking = Literal["pessimistic", "optimistic", "by_id"]
"""Order of equal scores: lower relevance first, higher relevance first, or by candidate id."""

_RELEVANCE_SIGN: Final[dict[str, int]] = {"pessimistic": 1, "optimistic": -1, "by_id": 0}

RelevanceColumn = Literal["label", "grade"]
"""Column with the relevance of a candidate."""


def validate_scores(scores: npt.ArrayLike, num_rows: int) -> npt.NDArray[np.float64]:
    """Returns the scores as float64, shape [rows].

    Raises:
        EvaluationError: What is no list of numbers, such as the path of a ranker; another shape
            than [rows], or a score that is NaN or infinite.
    """
    array = np.asarray(scores)
    if array.dtype.kind not in "biuf":
        raise EvaluationError(
            f"scores must be numbers, one per row, not {scores!r:.200}",
            fix="of the path of a ranker, pass as2ray.load(path)",
        )
    values = array.astype(np.float64)
    if values.shape != (num_rows,):
        raise EvaluationError(
            f"scores of shape {list(values.shape)}; a table of {num_rows:,} rows needs one per row"
        )
    bad_rows = np.flatnonzero(~np.isfinite(values))
    if len(bad_rows):
        first = f"first row {bad_rows[0]:,}: {values[bad_rows[0]]}"
        raise EvaluationError(f"{len(bad_rows):,} of {num_rows:,} scores are not finite, {first}")
    return values


def ranking_order(
    question_index: npt.NDArray[np.integer],
    score: npt.NDArray[np.float64],
    relevance: npt.NDArray[np.integer],
    candidate_rank: npt.NDArray[np.integer] | None = None,
    ties: TieBreaking = "pessimistic",
) -> npt.NDArray[np.int64]:
    """Returns row numbers by question, then descending score, then `ties`, then candidate id.

    Files list positives first, so a stable sort would give a constant scorer a perfect MAP.
    "pessimistic" gives it the lowest MAP that its ties allow.

    Args:
        question_index: Number of each row's question, shape [rows].
        score: Higher is better, finite, shape [rows].
        relevance: Label or grade, shape [rows].
        candidate_rank: Rank of each candidate id, shape [rows]; None keeps the order of the rows.
        ties: Order of equal scores of one question.

    Returns:
        A permutation of the rows, shape [rows].

    Raises:
        ConfigError: Unknown `ties`.
    """
    sign = lookup(_RELEVANCE_SIGN, ties, "order of ties")
    rank = np.arange(len(score)) if candidate_rank is None else candidate_rank
    return np.lexsort((rank, sign * relevance.astype(np.int64), -score, question_index))


def table_ranking_order(
    table: pa.Table,
    scores: npt.NDArray[np.float64],
    ties: TieBreaking = "pessimistic",
    relevance: RelevanceColumn = "label",
) -> npt.NDArray[np.int64]:
    """Returns the `ranking_order` of a candidates table, questions in order of appearance."""
    candidate_rank = pc.rank(table["candidate_id"], tiebreaker="dense").to_numpy()
    return ranking_order(
        question_indices(table), scores, read_relevance(table, relevance), candidate_rank, ties
    )


def read_relevance(table: pa.Table, column: RelevanceColumn) -> npt.NDArray[np.integer]:
    """Returns the relevance of each row, shape [rows].

    Raises:
        EvaluationError: No such column, or one with nulls.
    """
    if column not in table.column_names or table[column].null_count:
        problem = f"no column {column!r} without nulls among {table.column_names}"
        raise EvaluationError(problem, fix="use the relevance 'label', or a corpus with grades")
    return np.asarray(table[column])
