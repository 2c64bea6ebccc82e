"""The one total order of a question's candidates, on which every measure and run file stands.

Knows scores, relevance and ids as numpy arrays. Must not know measures, files or models.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from as2ray.errors import EvaluationError

Ties = Literal["pessimistic", "optimistic", "by_id"]
"""What decides between equal scores: the lower relevance first, the higher first, or the id."""


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
