"""Computes measures of scores on a candidates table, with an explicit order of equal scores."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import ir_measures
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from ir_measures import AP, RR, P

from as2ray.errors import ConfigError, EvaluationError
from as2ray.evaluation.histogram import histogram_svg
from as2ray.evaluation.presets import Measure, parse_measure
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
from as2ray.tables.schema import TableCounts, check_is_table, count_table, question_indices

NDCG_DEPTH = 10
"""Rank at which nDCG is cut during training."""


@runtime_checkable
class SupportsPredictTable(Protocol):
    """A ranker of `as2ray.models`, which this package does not import."""

    def predict_table(self, table: pa.Table) -> Any:
        """Returns scores whose `sort_keys` order the rows, shape [rows]."""


@dataclass(frozen=True)
class EvaluationResult:
    """Measures of a system on one table, and how they were computed."""

    measures: dict[str, float]
    """Mean over the questions, by measure."""
    per_question: pa.Table
    """Column question_id and one float column per measure, questions in the table's order."""
    counts: TableCounts
    """Size of the table after the filter."""
    question_filter: QuestionFilter
    """Which questions count."""
    ties: TieBreaking
    """Order of equal scores."""
    relevance: RelevanceColumn
    """Column with the relevance."""
    fingerprint: str
    """Fingerprint of the table before the filter."""

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {value:.4f}" for name, value in self.measures.items())
        count = f"{self.counts.num_questions:,} questions ({self.question_filter})"
        return f"{means}: {count}, ties {self.ties}"

    def _repr_html_(self) -> str:
        """Returns a table with the mean of each measure and the histogram of its questions."""
        rows = "".join(
            f"<tr><td>{name}</td><td>{mean:.4f}</td>"
            f"<td>{histogram_svg(self.per_question[name].to_numpy())}</td></tr>"
            for name, mean in self.measures.items()
        )
        head = "<tr><th>measure</th><th>mean</th><th>questions by value, 0 to 1</th></tr>"
        return f"<table>{head}{rows}</table><p>{self.counts} ({self.question_filter})</p>"


def evaluate(
    table: pa.Table,
    scores: "npt.ArrayLike | SupportsPredictTable",
    measures: Iterable[Measure | str] = (AP, RR, P @ 1),
    *,
    question_filter: QuestionFilter = "raw",
    ties: TieBreaking = "pessimistic",
    relevance: RelevanceColumn = "label",
) -> EvaluationResult:
    """Computes measures of `scores` on a candidates table.

    Under the filter "raw" a question without a positive counts as 0. The filter uses the label even
    if `relevance` is the grade, as for MS MARCO's `AP(rel=2)`.

    Relevant documents that are not in the table do not lower a measure. For the official numbers of
    a TREC track, write a run and evaluate it against all qrels.

    Args:
        table: Candidates; rows of one question need not be adjacent.
        scores: Higher is better, finite, shape [rows], in the order of the table; or a ranker.
        measures: ir-measures values, or their names.
        question_filter: Which questions count.
        ties: Order of equal scores.
        relevance: Column with the relevance.

    Raises:
        EvaluationError: Scores that do not fit the table, an unknown measure, one of grades such
            as `AP(rel=2)` of labels, no question that passes the filter, or no grades.
        ConfigError: Unknown filter or order of ties, or what is given is no table or no list of
            measures.
    """
    is_ranker = isinstance(scores, SupportsPredictTable)
    texts = ("question", "candidate") if is_ranker else ()
    check_is_table(table, ("question_id", "candidate_id", "label", *texts))
    if isinstance(measures, str) or not isinstance(measures, Iterable):
        raise ConfigError(f"measures must be a list such as ['AP', 'nDCG@10'], not {measures!r}")
    parsed_measures = [parse_measure(measure, relevance) for measure in measures]
    if not parsed_measures:
        raise EvaluationError("no measures; name at least one, such as 'AP'")
    array: Any = scores
    if isinstance(scores, SupportsPredictTable):
        array = scores.predict_table(table).sort_keys
    values = validate_scores(array, table.num_rows)
    mask = evaluated_rows(table, question_filter)
    filtered = table.filter(pa.array(mask))
    order = table_ranking_order(filtered, values[mask], ties, relevance)
    grades = read_relevance(filtered, relevance)[order]
    columns = _calculate_measures(parsed_measures, grades, np.bincount(question_indices(filtered)))
    return EvaluationResult(
        measures={name: float(np.mean(column)) for name, column in columns.items()},
        per_question=pa.table({"question_id": filtered["question_id"].unique(), **columns}),
        counts=count_table(filtered),
        question_filter=question_filter,
        ties=ties,
        relevance=relevance,
        fingerprint=fingerprint(table),
    )


def validation_measures(
    question_id: npt.ArrayLike,
    label: npt.ArrayLike,
    score: npt.ArrayLike,
    candidate_id: npt.ArrayLike | None = None,
    *,
    ties: TieBreaking = "pessimistic",
) -> dict[str, float]:
    """Computes AP, RR, P@1 and nDCG@10 with numpy only, for the validations of a training run.

    The means equal those of `evaluate`. A question without a positive counts as 0, so filter the
    rows first.

    Args:
        question_id: Question of each row, in any order, shape [rows].
        label: 0 or 1, shape [rows].
        score: Higher is better, finite, shape [rows].
        candidate_id: Order of equal scores if `ties` is "by_id", shape [rows].
        ties: Order of equal scores.

    Raises:
        EvaluationError: No rows, arrays of different lengths, or scores that are not finite.
    """
    relevance = (np.asarray(label) > 0).astype(np.int64)
    values = validate_scores(score, len(relevance))
    _, question_index = np.unique(np.asarray(question_id), return_inverse=True)
    if len(relevance) == 0 or question_index.shape != relevance.shape:
        raise EvaluationError(
            f"{len(question_index):,} question ids and {len(relevance):,} labels; every row needs "
            "one of each, and there must be a row"
        )
    rank_of_id = None if candidate_id is None else np.unique(candidate_id, return_inverse=True)[1]
    order = ranking_order(question_index, values, relevance, rank_of_id, ties)
    hits, sizes = relevance[order], np.bincount(question_index)
    starts = np.cumsum(sizes) - sizes
    hits_so_far = np.cumsum(hits)
    hits_so_far -= np.repeat((hits_so_far - hits)[starts], sizes)
    ranks = np.arange(len(hits)) - np.repeat(starts, sizes) + 1
    sum_of_precisions = np.add.reduceat(hits * hits_so_far / ranks, starts)
    num_hits = np.add.reduceat(hits, starts)
    discounts = np.where(ranks <= NDCG_DEPTH, 1 / np.log2(ranks + 1), 0.0)
    ideal = np.cumsum(1 / np.log2(np.arange(2, NDCG_DEPTH + 2)))
    ideal = ideal[np.clip(num_hits, 1, NDCG_DEPTH) - 1]
    by_question = {
        "AP": sum_of_precisions / np.maximum(num_hits, 1),
        "RR": np.maximum.reduceat(hits / ranks, starts),
        "P@1": hits[starts],
        f"nDCG@{NDCG_DEPTH}": np.add.reduceat(hits * discounts, starts) / ideal,
    }
    return {name: float(np.mean(values)) for name, values in by_question.items()}


def mean_average_precision(*arrays: npt.ArrayLike, ties: TieBreaking = "pessimistic") -> float:
    """Returns the AP of `validation_measures`, which has the same arguments."""
    return validation_measures(*arrays, ties=ties)["AP"]


def evaluated_rows(table: pa.Table, question_filter: QuestionFilter) -> np.ndarray:
    """Returns which rows belong to a question that passes the filter, bool, shape [rows].

    Raises:
        EvaluationError: No question passes.
    """
    mask = filter_mask(table, question_filter)
    if not mask.any():
        problem = f"no question left of {count_table(table)} under the filter {question_filter!r}"
        raise EvaluationError(problem, fix="use the filter 'raw', or a table with positives")
    return mask


def _calculate_measures(
    measures: Sequence[Measure], ranked_grades: np.ndarray, sizes: np.ndarray
) -> dict[str, list[float]]:
    """Returns the values of each measure by question.

    Args:
        measures: What to calculate.
        ranked_grades: Relevance of all candidates by question and rank, shape [rows].
        sizes: Number of candidates of each question, shape [questions].
    """
    # Candidate ids are ranks and scores strictly decrease, so that no provider of ir-measures
    # breaks ties in its own way.
    ids = [str(rank) for rank in range(sizes.max())]
    qrels, run = {}, {}
    for question, grades in enumerate(np.split(ranked_grades, np.cumsum(sizes)[:-1])):
        qrels[str(question)] = dict(zip(ids, grades.tolist()))
        run[str(question)] = dict(zip(ids, range(len(grades), 0, -1)))
    values: dict[str, list[float]] = {str(measure): [0.0] * len(sizes) for measure in measures}
    for metric in ir_measures.iter_calc(measures, qrels, run):
        values[str(metric.measure)][int(metric.query_id)] = metric.value
    return values
