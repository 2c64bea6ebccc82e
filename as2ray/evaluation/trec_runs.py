"""Evaluates a TREC run against qrels, including relevant documents that are not in the run."""

from collections.abc import Iterable

import ir_measures
import numpy as np
import pyarrow as pa
from ir_measures import AP, RR, P

from as2ray.errors import EvaluationError
from as2ray.evaluation.presets import Measure, parse_measure
from as2ray.tables.ranking_order import TieBreaking, ranking_order


def evaluate_run(
    run: pa.Table,
    qrels: pa.Table,
    measures: Iterable[Measure | str] = (AP, RR, P @ 1),
    *,
    ties: TieBreaking = "pessimistic",
) -> pa.Table:
    """Measures a run by question.

    Questions of the qrels with a relevant document count; without a line in the run their value is
    0. A document without a judgment is not relevant, as in trec_eval.

    Args:
        run: Columns question_id, candidate_id, score.
        qrels: Columns question_id, candidate_id, relevance.
        measures: ir-measures values, or their names.
        ties: Order of equal scores.

    Returns:
        A table with the column question_id and one column per measure.

    Raises:
        EvaluationError: No question in common, or an unknown measure.
    """
    parsed_measures = [parse_measure(measure) for measure in measures]
    judgments: dict[str, dict[str, int]] = {}
    for line in qrels.to_pylist():
        grades = judgments.setdefault(line["question_id"], {})
        grades[line["candidate_id"]] = line["relevance"]
    judgments = {q: grades for q, grades in judgments.items() if max(grades.values()) > 0}
    ranked = _rank_documents(run, judgments, ties)
    if not ranked:
        raise EvaluationError(
            f"a run over {len(run['question_id'].unique()):,} questions and qrels over "
            f"{len(judgments):,} with a relevant document have none in common"
        )
    values = {str(measure): dict.fromkeys(judgments, 0.0) for measure in parsed_measures}
    for metric in ir_measures.iter_calc(parsed_measures, judgments, ranked):
        values[str(metric.measure)][metric.query_id] = metric.value
    columns = {name: list(by_question.values()) for name, by_question in values.items()}
    return pa.table({"question_id": list(judgments), **columns})


def _rank_documents(
    run: pa.Table, judgments: dict[str, dict[str, int]], ties: TieBreaking
) -> dict[str, dict[str, int]]:
    """Returns the documents of judged questions with strictly decreasing scores, without ties."""
    questions, documents = (run[c].to_pylist() for c in ("question_id", "candidate_id"))
    grades = [judgments.get(q, {}).get(d, 0) for q, d in zip(questions, documents)]
    question_index = np.unique(questions, return_inverse=True)[1]
    rank_of_id = np.unique(documents, return_inverse=True)[1]
    scores, relevance = run["score"].to_numpy(), np.array(grades)
    order = ranking_order(question_index, scores, relevance, rank_of_id, ties)
    ranked: dict[str, dict[str, int]] = {}
    for row in order:
        if questions[row] in judgments:
            scores_of = ranked.setdefault(questions[row], {})
            # Small numbers: trec_eval holds scores in float32, where those above 2^24 are equal.
            scores_of[documents[row]] = -len(scores_of)
    return ranked
