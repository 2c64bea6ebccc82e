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
from as2ray.evaluation.presets import PAPER_PRESETS, Measure, PaperPreset, parse_measure
from as2ray.tables.filters import QuestionFilter, filter_mask
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.ranking_order import (
    RelevanceColumn,
    TieBreaking,
    ranking_order,
    read_relevance,
    table_ranking_order,
    validate_scores,
)
from as2ray.tables.schema import TableCounts, count_table, question_indices

__all__ = [
    "PAPER_PRESETS",
    "EvaluationResult",
    "QuestionFilter",
    "Measure",
    "PaperPreset",
    "RelevanceColumn",
    "TieBreaking",
    "parse_measure",
    "evaluate",
    "filter_mask",
    "evaluated_rows",
    "mean_average_precision",
]


@dataclass(frozen=True)
class EvaluationResult:
    """What a system is worth on one table, and on what that was computed."""

    measures: dict[str, float]
    """Mean over the questions by the measure's name."""
    per_question: pa.Table
    """Column question_id and one float column a measure, questions in the table's order."""
    counts: TableCounts
    """Size of the table after the filter."""
    question_filter: QuestionFilter
    """Questions that counted."""
    ties: TieBreaking
    """What decided between equal scores."""
    relevance: RelevanceColumn
    """Column that was taken as relevance."""
    fingerprint: str
    """Fingerprint of the whole table, before the filter."""


def evaluate(
    table: pa.Table,
    scores: npt.ArrayLike,
    measures: Iterable[Measure | str] = (AP, RR, P @ 1),
    *,
    question_filter: QuestionFilter = "raw",
    ties: TieBreaking = "pessimistic",
    relevance: RelevanceColumn = "label",
) -> EvaluationResult:
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
    wanted = [parse_measure(m) for m in measures]
    values = validate_scores(scores, table.num_rows)
    kept = evaluated_rows(table, question_filter)
    questions = table.filter(pa.array(kept))
    columns = _calculate_measures(wanted, questions, values[kept], ties, relevance)
    return EvaluationResult(
        measures={name: float(np.mean(column)) for name, column in columns.items()},
        per_question=pa.table({"question_id": questions["question_id"].unique(), **columns}),
        counts=count_table(questions),
        question_filter=question_filter,
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
    ties: TieBreaking = "pessimistic",
) -> float:
    """MAP in numpy alone, for every validation of a training run; equals `evaluate`'s AP.

    All arguments have shape [rows], in any order of rows. A question without a positive counts
    as 0: filter before. `candidate_id` decides only where `ties` is "by_id".

    Raises:
        EvaluationError: No rows, arrays of different lengths, or scores that are not finite.
    """
    relevant = (np.asarray(label) > 0).astype(np.int64)
    values = validate_scores(score, len(relevant))
    _, question = np.unique(np.asarray(question_id), return_inverse=True)
    if len(relevant) == 0 or question.shape != relevant.shape:
        raise EvaluationError(
            f"{len(question):,} question ids, {len(relevant):,} labels"
            "; expected one of each for every row, and at least one row",
            fix="take all columns from the same table",
        )
    ids = None if candidate_id is None else np.unique(candidate_id, return_inverse=True)[1]
    order = ranking_order(question, values, relevant, ids, ties)
    hit, size = relevant[order], np.bincount(question)
    starts = np.cumsum(size) - size
    found = np.cumsum(hit)
    found -= np.repeat((found - hit)[starts], size)
    rank = np.arange(len(hit)) - np.repeat(starts, size) + 1
    gained = np.add.reduceat(hit * found / rank, starts)
    return float(np.mean(gained / np.maximum(np.add.reduceat(hit, starts), 1)))


def evaluated_rows(table: pa.Table, question_filter: QuestionFilter) -> np.ndarray:
    """Rows whose question counts, bool, shape [rows].

    Raises:
        EvaluationError: None does.
    """
    kept = filter_mask(table, question_filter)
    if not kept.any():
        raise EvaluationError(
            f"no question left of {count_table(table)} under the filter {question_filter!r}"
            "; expected at least one question",
            fix="choose the filter 'raw', or a table that has labels",
        )
    return kept


def _calculate_measures(
    measures: Sequence[Measure],
    table: pa.Table,
    scores: npt.NDArray[np.float64],
    ties: TieBreaking,
    relevance: RelevanceColumn,
) -> dict[str, list[float]]:
    # Values by measure, questions in order of appearance. Providers get places as ids and
    # strictly decreasing scores, so that none of them can break a tie its own way.
    best_first = read_relevance(table, relevance)[
        table_ranking_order(table, scores, ties, relevance)
    ]
    size = np.bincount(question_indices(table))
    places = [str(place) for place in range(size.max())]
    qrels, run = {}, {}
    for number, grades in enumerate(np.split(best_first, np.cumsum(size)[:-1])):
        qrels[str(number)] = dict(zip(places, grades.tolist()))
        run[str(number)] = dict(zip(places, range(len(grades), 0, -1)))
    values: dict[str, list[float]] = {str(m): [0.0] * len(size) for m in measures}
    for metric in ir_measures.iter_calc(measures, qrels, run):
        values[str(metric.measure)][int(metric.query_id)] = metric.value
    return values
