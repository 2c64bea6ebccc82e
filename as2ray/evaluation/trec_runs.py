"""A TREC run against qrels: no table, and relevant documents that the run never found count.

Knows runs and qrels as `evaluation/trec.py` reads them. Must not know models or files.
"""

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
    """Measures of a run by question: column question_id and one a measure.

    Questions are those of the qrels with a relevant document; one without a line in the run
    counts as 0. A document that was not judged counts as not relevant, as in trec_eval.

    Args:
        run: Columns question_id, candidate_id, score.
        qrels: Columns question_id, candidate_id, relevance.
        measures: ir-measures values, or their names.
        ties: What decides between equal scores.

    Raises:
        EvaluationError: No question in common, or an unknown measure.
    """
    wanted = [parse_measure(m) for m in measures]
    judged: dict[str, dict[str, int]] = {}
    for line in qrels.to_pylist():
        judged.setdefault(line["question_id"], {})[line["candidate_id"]] = line["relevance"]
    judged = {q: docs for q, docs in judged.items() if any(g > 0 for g in docs.values())}
    ranked = _rank_documents(run, judged, ties)
    if not ranked:
        raise EvaluationError(
            f"a run over {len(run['question_id'].unique()):,} questions and qrels over "
            f"{len(judged):,} with a relevant document have none in common"
            "; expected the same question ids in both",
            fix="give the qrels of this run",
        )
    values = {str(m): dict.fromkeys(judged, 0.0) for m in wanted}
    for metric in ir_measures.iter_calc(wanted, judged, ranked):
        values[str(metric.measure)][metric.query_id] = metric.value
    columns = {name: list(by_question.values()) for name, by_question in values.items()}
    return pa.table({"question_id": list(judged), **columns})


def _rank_documents(
    run: pa.Table, judgments: dict[str, dict[str, int]], ties: TieBreaking
) -> dict[str, dict[str, int]]:
    """The run's documents with strictly decreasing scores, so that no provider breaks a tie."""
    questions, documents = (run[c].to_pylist() for c in ("question_id", "candidate_id"))
    relevance = np.array(
        [judgments.get(q, {}).get(d, 0) for q, d in zip(questions, documents)], int
    )
    numbers = np.unique(questions, return_inverse=True)[1]
    places = np.unique(documents, return_inverse=True)[1]
    scores = run["score"].to_numpy()
    ranked: dict[str, dict[str, int]] = {}
    for place, row in enumerate(ranking_order(numbers, scores, relevance, places, ties)):
        if questions[row] in judgments:
            ranked.setdefault(questions[row], {})[documents[row]] = -place
    return ranked
