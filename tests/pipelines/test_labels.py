"""Stages of BM25: index, candidates, labels, samples."""

import json
from dataclasses import asdict

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.records import CANDIDATES, count, fingerprint, validate
from as2ray.retrieval.bm25 import BM25
from as2ray.stages import stage
from pipelines.labels import candidates_indexed, questions_of, retrieved, sampled, tried, tuned
from pipelines.steps import TABLE, table

ROWS = [
    ("a", "which birds hunt mice", "a-0", "Owls hunt mice.", 1),
    ("a", "which birds hunt mice", "a-1", "Cats  sleep.", 0),
    ("b", "when do cats sleep", "b-0", "All day long.", 1),
    ("b", "when do cats sleep", "b-1", "Cats sleep.", 0),
    ("b", "when do cats sleep", "b-2", "Mice run.", 0),
]


@pytest.fixture
def source(tmp_path):
    columns = zip(zip(*ROWS), CANDIDATES)
    rows = pa.table([pa.array(c, f.type) for c, f in columns], schema=CANDIDATES)

    def make(part):
        pq.write_table(rows, part / TABLE)
        return {"fingerprint": fingerprint(rows), "counts": asdict(count(rows))}

    return stage(tmp_path / "source", {"rows": 1}, make)


def texts(path):
    return [(r["question_id"], r["candidate"], r["label"]) for r in table(path).to_pylist()]


def test_retrieved_candidates_come_from_all_and_keep_their_labels(source, tmp_path):
    index = candidates_indexed(tmp_path / "index", [source], BM25())
    found = json.loads((index / "manifest.json").read_text())["found"]
    assert found["sentences"] == 4  # one text stands twice, with other blanks
    tested = retrieved(tmp_path / "test", source, index, 10, False)
    validate(table(tested), "retrieved")
    assert texts(tested) == [
        ("a", "Owls hunt mice.", 1),
        ("a", "Mice run.", 0),
        ("b", "Cats sleep.", 0),
    ]
    learnt = retrieved(tmp_path / "train", source, index, 10, True)
    assert texts(learnt)[-2:] == [("b", "Cats sleep.", 0), ("b", "All day long.", 1)]
    assert len(texts(retrieved(tmp_path / "one", source, index, 1, False))) == 2


def test_sample_is_a_stage_with_some_questions(source, tmp_path):
    drawn = sampled(tmp_path / "sample", source, 1, 0, True)
    assert len(questions_of(drawn)) == 1
    assert [q.text for q in questions_of(source)] == ["which birds hunt mice", "when do cats sleep"]


def test_tuned_takes_the_best_of_the_grid(source, tmp_path):
    best = tuned(tmp_path / "bm25", source, True)
    found = json.loads((tmp_path / "bm25" / "manifest.json").read_text())["found"]
    assert (best.k1, best.b) == (found["k1"], found["b"])
    rows = table(source)
    terms = BM25().terms(rows["candidate"].to_pylist())
    again = tried([(best.k1, best.b)], (rows, terms))
    assert again == [[best.k1, best.b, found["RR"]]]
    assert found["RR"] == max(point[2] for point in found["grid"])
