"""Scores and a candidates table in, measures out, on an explicit total order.

Knows candidates tables and ir-measures values. Must not know models, files or Ray.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ir_measures
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from ir_measures import AP, RR, P

from as2ray.errors import EvaluationError
from as2ray.evaluation.order import (
    Relevance,
    Ties,
    checked_scores,
    order_of,
    relevance_of,
    total_order,
)
from as2ray.evaluation.presets import PRESETS, Measure, Preset, as_measure
from as2ray.filters import Filter, filter_mask
from as2ray.records import Counts, count, fingerprint, question_numbers

__all__ = [
    "PRESETS",
    "Evaluation",
    "Filter",
    "Measure",
    "Preset",
    "Relevance",
    "Ties",
    "as_measure",
    "evaluate",
    "filter_mask",
    "kept_of",
    "mean_average_precision",
]


@dataclass(frozen=True)
class Evaluation:
    """What a system is worth on one table, and on what that was computed."""

    measures: dict[str, float]
    """Mean over the questions by the measure's name."""
    per_question: pa.Table
    """Column question_id and one float column a measure, questions in the table's order."""
    counts: Counts
    """Size of the table after the filter."""
    filter: Filter
    """Questions that counted."""
    ties: Ties
    """What decided between equal scores."""
    relevance: Relevance
    """Column that was taken as relevance."""
    fingerprint: str
    """Fingerprint of the whole table, before the filter."""


def evaluate(
    table: pa.Table,
    scores: npt.ArrayLike,
    measures: Iterable[Measure | str] = (AP, RR, P @ 1),
    *,
    filter: Filter = "raw",
    ties: Ties = "pessimistic",
    relevance: Relevance = "label",
) -> Evaluation:
    """Measures of `scores` on a candidates table.

    Under the filter "raw" a question without a positive counts as 0. The filter looks at labels,
    also where `relevance` is the grade: MS MARCO's `AP(rel=2)` is asked with `relevance="grade"`.
    Only the table's candidates are known: a relevant one that a first stage missed lowers nothing
    here. For a track's official numbers, write a run and give it to trec_eval with all qrels.

    Args:
        table: Candidates; rows of one question need not be adjacent.
        scores: Higher is better, finite, shape [rows], aligned to the table.
        measures: ir-measures values, or their names.
        filter: Which questions count.
        ties: What decides between equal scores.
        relevance: Column that says how relevant a candidate is.

    Raises:
        EvaluationError: Scores that do not fit, an unknown measure, no question left, no grades.
    """
    wanted = [as_measure(m) for m in measures]
    values = checked_scores(scores, table.num_rows)
    kept = kept_of(table, filter)
    questions = table.filter(pa.array(kept))
    columns = _calculate(wanted, questions, values[kept], ties, relevance)
    return Evaluation(
        measures={name: float(np.mean(column)) for name, column in columns.items()},
        per_question=pa.table({"question_id": questions["question_id"].unique(), **columns}),
        counts=count(questions),
        filter=filter,
        ties=ties,
        relevance=relevance,
        fingerprint=fingerprint(table),
    )


def mean_average_precision(
    question_id: npt.ArrayLike,
    label: npt.ArrayLike,
    score: npt.ArrayLike,
    candidate_id: npt.ArrayLike | None = None,
    *,
    ties: Ties = "pessimistic",
) -> float:
    """MAP in numpy alone, for every validation of a training run; equals `evaluate`'s AP.

    All arguments have shape [rows], in any order of rows. A question without a positive counts
    as 0: filter before. `candidate_id` decides only where `ties` is "by_id".

    Raises:
        EvaluationError: No rows, arrays of different lengths, or scores that are not finite.
    """
    relevant = (np.asarray(label) > 0).astype(np.int64)
    values = checked_scores(score, len(relevant))
    _, question = np.unique(np.asarray(question_id), return_inverse=True)
    if len(relevant) == 0 or question.shape != relevant.shape:
        raise EvaluationError(
            f"{len(question):,} question ids, {len(relevant):,} labels",
            expected="one of each for every row, and at least one row",
            mend="take all columns from the same table",
        )
    ids = None if candidate_id is None else np.unique(candidate_id, return_inverse=True)[1]
    order = total_order(question, values, relevant, ids, ties)
    hit, size = relevant[order], np.bincount(question)
    starts = np.cumsum(size) - size
    found = np.cumsum(hit)
    found -= np.repeat((found - hit)[starts], size)
    rank = np.arange(len(hit)) - np.repeat(starts, size) + 1
    gained = np.add.reduceat(hit * found / rank, starts)
    return float(np.mean(gained / np.maximum(np.add.reduceat(hit, starts), 1)))


def kept_of(table: pa.Table, filter: Filter) -> np.ndarray:
    """Rows whose question counts, bool, shape [rows].

    Raises:
        EvaluationError: None does.
    """
    kept = filter_mask(table, filter)
    if not kept.any():
        raise EvaluationError(
            f"no question left of {count(table)} under the filter {filter!r}",
            expected="at least one question",
            mend="choose the filter 'raw', or a table that has labels",
        )
    return kept


def _calculate(
    measures: Sequence[Measure],
    table: pa.Table,
    scores: npt.NDArray[np.float64],
    ties: Ties,
    relevance: Relevance,
) -> dict[str, list[float]]:
    # Values by measure, questions in order of appearance. Providers get places as ids and
    # strictly decreasing scores, so that none of them can break a tie its own way.
    best_first = relevance_of(table, relevance)[order_of(table, scores, ties, relevance)]
    size = np.bincount(question_numbers(table))
    places = [str(place) for place in range(size.max())]
    qrels, run = {}, {}
    for number, grades in enumerate(np.split(best_first, np.cumsum(size)[:-1])):
        qrels[str(number)] = dict(zip(places, grades.tolist()))
        run[str(number)] = dict(zip(places, range(len(grades), 0, -1)))
    values: dict[str, list[float]] = {str(m): [0.0] * len(size) for m in measures}
    for metric in ir_measures.iter_calc(measures, qrels, run):
        values[str(metric.measure)][int(metric.query_id)] = metric.value
    return values
