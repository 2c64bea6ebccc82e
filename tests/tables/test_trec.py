import gzip
from urllib.parse import unquote

import numpy as np
import pytest
import pytrec_eval
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from as2ray.errors import EvaluationError
from as2ray.evaluation.measures import evaluate
from as2ray.tables.trec import align_run, quote_names, read_qrels, read_run, write_run


def test_run_round_trip_keeps_float32_scores_bit_for_bit(make_table, tmp_path):
    table = make_table([[0, 1, 0], [1, 0]])
    scores = np.float32([0.1, 0.3, 0.2, -7e-5, 1e20])
    write_run(tmp_path / "run", table, scores)
    run = read_run(tmp_path / "run")
    assert run["candidate_id"].to_pylist() == ["q0-1", "q0-2", "q0-0", "q1-1", "q1-0"]
    np.testing.assert_array_equal(align_run(run, table).astype(np.float32), scores)
    write_run(tmp_path / "again", table, align_run(run, table))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "run").read_bytes()


def test_scores_that_are_one_float32_are_written_as_two(make_table, tmp_path):
    write_run(tmp_path / "run", make_table([[1, 0]]), [0.1 + 1e-12, 0.1])
    written = read_run(tmp_path / "run")["score"].to_numpy()
    np.testing.assert_array_equal(written, written.astype(np.float32))
    assert written[0] == np.float32(0.1) > written[1]


def test_scores_beyond_float32_are_written_as_its_limits(make_table, tmp_path):
    write_run(tmp_path / "run", make_table([[1, 0]]), [1e300, -1e300])
    written = read_run(tmp_path / "run")["score"].to_numpy()
    assert written.tolist() == [np.float32(1e38), np.float32(-1e38)]


def test_run_has_trec_columns(make_table, tmp_path):
    write_run(tmp_path / "run", make_table([[1, 0]]), [0.5, 0.25], tag="mine")
    assert (tmp_path / "run").read_text() == "q0 Q0 q0-0 1 0.5 mine\nq0 Q0 q0-1 2 0.25 mine\n"
    write_run(tmp_path / "run", make_table([[1]]), [0.5])
    assert (tmp_path / "run").read_text() == "q0 Q0 q0-0 1 0.5 as2ray\n"


def test_equal_scores_are_written_in_the_given_order(make_table, tmp_path):
    for ties, order in (("optimistic", ["q0-1", "q0-0"]), ("pessimistic", ["q0-0", "q0-1"])):
        write_run(tmp_path / "run", make_table([[0, 1]]), [0.5, 0.5], ties=ties)
        assert read_run(tmp_path / "run")["candidate_id"].to_pylist() == order


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.sampled_from([0.0, 1.0, 1 / 3, -1e300, 1e-300]),
    st.sampled_from([0.0, 1e-12, 1.0]),
)
def test_run_read_by_trec_eval_gives_our_measure_also_with_ties(
    make_table, tmp_path_factory, labels, base, step
):
    table = make_table([labels])
    scores = base + step * (np.arange(len(labels)) % 3)
    path = tmp_path_factory.mktemp("runs") / "run"
    write_run(path, table, scores)
    run = {r["candidate_id"]: r["score"] for r in read_run(path).to_pylist()}
    qrels = dict(zip(table["candidate_id"].to_pylist(), labels))
    theirs = pytrec_eval.RelevanceEvaluator({"q0": qrels}, {"map"}).evaluate({"q0": run})
    assert theirs["q0"]["map"] == evaluate(table, scores, ["AP"]).measures["AP"]
    again = evaluate(table, align_run(read_run(path), table), ["AP"], ties="optimistic")
    assert again.measures["AP"] == theirs["q0"]["map"]


def test_qrels_are_read_in_the_order_of_the_file(make_table, tmp_path):
    table = make_table([[1, 0], [0]], grades=[[3, 1], [0]])
    tiny.write_qrels(tmp_path / "qrels", table, "grade")
    assert (tmp_path / "qrels").read_text() == "q0 0 q0-0 3\nq0 0 q0-1 1\nq1 0 q1-0 0\n"
    qrels = read_qrels(tmp_path / "qrels")
    assert qrels["candidate_id"].to_pylist() == table["candidate_id"].to_pylist()
    assert qrels["relevance"].to_pylist() == [3, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q Q0 a 1 0.5 t\nq Q0 b 2 0.4\n", "run:2: .*expected 6, got 5"),
        (
            "q Q0 a 1 high t\n",
            "run:1: .*has not the columns `question Q0 candidate rank score tag`.*'high'",
        ),
        ("\nq Q0 a 1 nan t\n", "run:2: the score nan is not finite"),
        ("q Q0 a 1 2 t\nq Q0 b 2 1 t\nq Q0 a 3 0 t\n", "run:3: q a again, as in line 1"),
    ],
)
def test_malformed_run_names_line_and_problem(tmp_path, text, message):
    (tmp_path / "run").write_text(text)
    with pytest.raises(EvaluationError, match=message):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    "text", ["q 0 a\n", "q 0 a 0.5\n", "q 0 a yes\n", "q 0 a 1\nq 0 a 0\n", "q 0 a 1 x\n"]
)
def test_malformed_qrels_are_refused(tmp_path, text):
    (tmp_path / "qrels").write_text(text)
    with pytest.raises(EvaluationError, match=r"qrels:\d") as error:
        read_qrels(tmp_path / "qrels")
    assert "has not the columns `question 0 candidate relevance`" in str(error.value) or (
        "again, as in line 1" in str(error.value)
    )


def test_empty_files_give_empty_tables(tmp_path):
    (tmp_path / "empty").write_text("\n")
    assert read_run(tmp_path / "empty").num_rows == 0
    assert read_qrels(tmp_path / "empty").schema.names == [
        "question_id",
        "candidate_id",
        "relevance",
    ]


def test_ids_with_white_space_are_refused(make_table, tmp_path):
    table = make_table([[1, 0]])
    spaced = table.set_column(2, "candidate_id", [["a b", "c"]])
    with pytest.raises(EvaluationError, match=r"1 names .* 'a b'"):
        write_run(tmp_path / "run", spaced, [1.0, 2.0])
    with pytest.raises(EvaluationError, match="'my tag'"):
        write_run(tmp_path / "run", table, [1.0, 2.0], tag="my tag")


def test_quoted_ids_of_a_run_are_distinct_and_can_be_mapped_back(make_table, tmp_path):
    table = make_table([[1, 0, 0, 0, 0]])
    assert quote_names(table) is table
    for ids in (["100%25", "100%"], ["100%", "a b", "a%20b", "a\u2003\tb\x1c", ""]):
        spaced = table.slice(0, len(ids)).set_column(2, "candidate_id", [ids])
        write_run(tmp_path / "run", quote_names(spaced), range(len(ids), 0, -1))
        written = read_run(tmp_path / "run")["candidate_id"].to_pylist()
        if len(ids) == 2:
            assert written == ids
        else:
            assert [*map(unquote, written[:-1]), written[-1]] == [*ids[:-1], "%"]


def test_run_of_other_candidates_is_refused_with_numbers(make_table, tmp_path):
    write_run(tmp_path / "run", make_table([[1, 0, 0]]), [3.0, 2.0, 1.0])
    run = read_run(tmp_path / "run")
    with pytest.raises(EvaluationError, match=r"1 without a score .*q1-0.* 2 unknown"):
        align_run(run, make_table([[1], [1]]))
    with pytest.raises(EvaluationError, match="1 twice"):
        align_run(run.take([0, 1, 2, 2]), make_table([[1, 0, 0]]))


def test_qrels_may_begin_with_a_byte_order_mark_and_are_utf_8(tmp_path):
    (tmp_path / "q").write_text("é 0 a 1\n", encoding="utf-8-sig")
    assert read_qrels(tmp_path / "q")["question_id"].to_pylist() == ["é"]
    (tmp_path / "q").write_text("x 0 a 1\né 0 a 1\n", encoding="latin-1")
    with pytest.raises(EvaluationError, match="q:2: bytes that are not UTF-8"):
        read_qrels(tmp_path / "q")


def test_compressed_files_are_read_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "qrels.tsv.gz"
    path.write_bytes(gzip.compress(b"q 0 a 1\nq 0 b 0\n"))
    assert read_qrels(path)["relevance"].to_pylist() == [1, 0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EvaluationError, match=r"qrels\.tsv\.gz is damaged: "):
        read_qrels(path)
    path.write_bytes(b"q 0 a 1\n")
    with pytest.raises(EvaluationError, match=r"qrels\.tsv\.gz is damaged: Not a gzipped file"):
        read_qrels(path)
