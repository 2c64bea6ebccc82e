"""Stages of BM25: index, candidates, labels, samples."""

import json
import os
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.errors import ConfigError
from as2ray.experiments.stage import stage
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig, Query
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.schema import CANDIDATE_SCHEMA, count_table, validate_table
from as2ray.text.bm25 import BM25
from pipelines.labels import (
    INDEX,
    index_candidates,
    index_documents,
    label_queries,
    questions_of,
    retrieval_scores,
    retrieve_candidates,
    sample_table,
    split_train_dev,
    tune_bm25,
)
from pipelines.steps import TABLE, table
from pipelines.trials import keywords

ROWS = [
    ("a", "which birds hunt mice", "a-0", "Owls hunt mice.", 1),
    ("a", "which birds hunt mice", "a-1", "Cats  sleep.", 0),
    ("b", "when do cats sleep", "b-0", "All day long.", 1),
    ("b", "when do cats sleep", "b-1", "Cats sleep.", 0),
    ("b", "when do cats sleep", "b-2", "Mice run.", 0),
]


@pytest.fixture
def source(tmp_path):
    columns = zip(zip(*ROWS), CANDIDATE_SCHEMA)
    rows = pa.table([pa.array(c, f.type) for c, f in columns], schema=CANDIDATE_SCHEMA)

    def make(part):
        pq.write_table(rows, part / TABLE)
        return {"fingerprint": fingerprint(rows), "counts": asdict(count_table(rows))}

    return stage(tmp_path / "source", {"rows": 1}, make)


def texts(path):
    return [(r["question_id"], r["candidate"], r["label"]) for r in table(path).to_pylist()]


def test_retrieved_candidates_come_from_all_and_keep_their_labels(source, tmp_path):
    index = index_candidates(tmp_path / "index", [source], BM25())
    found = json.loads((index / "manifest.json").read_text())["outputs"]
    assert found["sentences"] == 4  # one text stands twice, with other blanks
    tested = retrieve_candidates(tmp_path / "test", source, index, 10, False)
    validate_table(table(tested), "retrieved")
    assert texts(tested) == [
        ("a", "Owls hunt mice.", 1),
        ("a", "Mice run.", 0),
        ("b", "Cats sleep.", 0),
    ]
    learnt = retrieve_candidates(tmp_path / "train", source, index, 10, True)
    assert texts(learnt)[-2:] == [("b", "Cats sleep.", 0), ("b", "All day long.", 1)]
    one = retrieve_candidates(tmp_path / "one", source, index, 1, False)
    assert len(texts(one)) == 2
    missed = {"finds nothing": 0, "misses all positives": 1}
    assert json.loads((one / "manifest.json").read_text())["outputs"]["bm25"] == missed


def test_retrieved_candidates_are_scored_by_the_index_that_found_them(source, tmp_path):
    index = index_candidates(tmp_path / "index", [source], BM25())
    rows = table(retrieve_candidates(tmp_path / "train", source, index, 10, True))
    scores = retrieval_scores(rows, index, 10)
    held = SentenceIndex.open(index / INDEX)
    tops = [hit.score for question in ROWS[::2][:2] for hit in held.search(question[1], 10)]
    assert scores.tolist() == [*tops, 0.0]  # the last is a positive that BM25 missed


def test_questions_that_find_nothing_are_counted(source, tmp_path):
    index = index_candidates(tmp_path / "index", [source], BM25())
    zebras = table(source).set_column(1, "question", pa.array(["zebra?"] * len(ROWS)))

    def make(part):
        pq.write_table(zebras, part / TABLE)
        return {"fingerprint": fingerprint(zebras), "counts": asdict(count_table(zebras))}

    found = retrieve_candidates(
        tmp_path / "none", stage(tmp_path / "zebras", {}, make), index, 10, False
    )
    told = json.loads((found / "manifest.json").read_text())["outputs"]
    assert told["bm25"] == {"finds nothing": 2, "misses all positives": 2}
    assert told["counts"]["num_questions"] == 0


def test_file_that_cannot_be_read_or_named_in_unicode_stops_no_index(tmp_path):
    root = tmp_path / "documents"
    root.mkdir()
    (root / "owls.txt").write_text("Owls hunt mice.")
    (root / "memory.txt").symlink_to("/proc/self/mem")
    (root / os.fsdecode(b"caf\xe9.txt")).write_text("Coffee here.")
    made = index_documents(tmp_path / "index", root, IndexConfig())
    found = json.loads((made / "manifest.json").read_text())["outputs"]
    assert (found["documents"], found["skipped"]) == (2, {"unreadable": 1})


def test_sample_is_a_stage_with_some_questions(source, tmp_path):
    drawn = sample_table(tmp_path / "sample", source, 1, 0, True)
    assert len(questions_of(drawn)) == 1
    assert [q.text for q in questions_of(source)] == ["which birds hunt mice", "when do cats sleep"]


@pytest.mark.parametrize("share", [1, 10**9])  # by their hashes all are dev's, or none
def test_neither_part_of_a_divided_table_is_empty(source, tmp_path, share):
    parts = split_train_dev(tmp_path / "parts", source, share)
    assert [len(questions_of(parts[name])) for name in ("train", "dev")] == [1, 1]
    found = json.loads((parts["dev"] / "manifest.json").read_text())["outputs"]
    assert found["fingerprint"] == fingerprint(table(parts["dev"]))
    assert {row[0] for part in parts.values() for row in texts(part)} == {"a", "b"}


def test_one_labelled_question_that_cannot_be_divided_leaves_no_stage(source, tmp_path):
    index = index_candidates(tmp_path / "index", [source], BM25())
    queries = [Query("a", "cats and mice"), Query("b", "zebra")]
    with pytest.raises(ConfigError, match="1 questions that BM25 can label of 2") as told:
        label_queries(tmp_path / "labelled", index, queries, PseudoLabelConfig(), divides=True)
    assert "at least two are needed" in told.value.problem
    assert not (tmp_path / "labelled").exists()
    assert (
        len(questions_of(label_queries(tmp_path / "one", index, queries, PseudoLabelConfig()))) == 1
    )


def test_tuned_takes_the_best_of_the_grid(source, tmp_path):
    best = tune_bm25(tmp_path / "bm25", source, True)
    found = json.loads((tmp_path / "bm25" / "manifest.json").read_text())["outputs"]
    assert (best.k1, best.b) == (found["k1"], found["b"])
    rows = table(source)
    terms = BM25().count_terms(rows["candidate"].to_pylist())
    again = keywords([(best.k1, best.b)], (rows, terms))
    assert again == [[best.k1, best.b, found["RR"]]]
    assert found["RR"] == max(point[2] for point in found["grid"])
