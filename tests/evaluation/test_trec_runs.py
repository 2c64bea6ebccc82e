import pyarrow as pa
import pytest
from ir_measures import RR, P

from as2ray.errors import EvaluationError
from as2ray.evaluation.trec_runs import evaluate_run


def run_of(*lines):
    return pa.table(dict(zip(("question_id", "candidate_id", "score"), map(list, zip(*lines)))))


def qrels_of(*lines):
    names = ("question_id", "candidate_id", "relevance")
    return pa.table(dict(zip(names, map(list, zip(*lines)))))


QRELS = qrels_of(
    ("a", "1", 1), ("a", "2", 0), ("b", "1", 2), ("b", "3", 1), ("c", "9", 1), ("d", "1", 0)
)


def test_questions_with_a_relevant_document_count_whether_it_was_found_or_not():
    run = run_of(
        *(("a", "2", 3.0), ("a", "1", 2.0), ("a", "7", 9.0)),  # 7 has no judgment
        *(("b", "3", 1.0), ("b", "4", 0.5)),  # 1 is not in the run
        *(("d", "1", 1.0), ("e", "1", 1.0)),  # no relevant document, no judgment at all
    )
    table = evaluate_run(run, QRELS)
    assert table.column_names == ["question_id", "AP", "RR", "P@1"]
    assert table["question_id"].to_pylist() == ["a", "b", "c"]
    assert table["AP"].to_pylist() == pytest.approx([1 / 3, 1 / 2, 0.0])
    assert table["RR"].to_pylist() == pytest.approx([1 / 3, 1.0, 0.0])
    assert table["P@1"].to_pylist() == [0.0, 1.0, 0.0]
    assert evaluate_run(run, QRELS, ["P@3", RR]).column_names == ["question_id", "P@3", "RR"]


def test_equal_scores_of_a_run_are_ordered_against_it_unless_asked():
    run = run_of(("a", "1", 1.0), ("a", "2", 1.0), ("a", "7", 1.0))
    for ties, place in (("pessimistic", 3), ("by_id", 1), ("optimistic", 1)):
        table = evaluate_run(run, QRELS, [RR, P @ 1], ties=ties)
        assert table["RR"].to_pylist() == pytest.approx([1 / place, 0, 0])
    assert evaluate_run(run, QRELS, [RR])["RR"][0].as_py() == pytest.approx(1 / 3)
    second = run_of(("b", "3", 1.0), ("b", "2", 1.0))
    assert evaluate_run(second, QRELS, [RR], ties="by_id")["RR"].to_pylist() == [0, 0.5, 0]


def test_run_over_other_questions_is_refused_with_numbers():
    with pytest.raises(EvaluationError, match="over 2 questions and qrels over 3 with a relevant"):
        evaluate_run(run_of(("d", "1", 1.0), ("x", "1", 1.0), ("x", "2", 1.0)), QRELS)
    with pytest.raises(EvaluationError, match="over 0 questions"):
        evaluate_run(run_of(("a", "1", 1.0)).slice(0, 0), QRELS)


def test_scores_that_are_measured_stay_small_in_a_run_of_any_length(monkeypatch):
    measured = {}
    monkeypatch.setattr(
        "as2ray.evaluation.trec_runs.ir_measures.iter_calc",
        lambda measures, judgments, run: measured.update(run) or (),
    )
    evaluate_run(run_of(("a", "1", 1.0), ("a", "2", 2.0), ("b", "3", 1.0), ("b", "1", 0.5)), QRELS)
    # In float32, which trec_eval uses, numbers above 2^24 are not all different.
    assert measured == {"a": {"2": 0, "1": -1}, "b": {"3": 0, "1": -1}}
