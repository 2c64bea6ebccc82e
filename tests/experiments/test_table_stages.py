"""Stages of candidates tables."""

import shutil
from dataclasses import replace

import pytest
import tiny
from pyarrow import csv

from as2ray.corpora.leaks import check_leaks
from as2ray.corpora.registry import CORPORA, get_corpus
from as2ray.corpora.sampling import sample_questions
from as2ray.errors import As2rayError, StaleStageError
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.stage import Result
from as2ray.experiments.tables import PreparedTable, prepared_table, read_table, release_files
from as2ray.tables.source_files import describe_files


def test_table_with_other_counts_than_published_needs_verify_false(complete, tmp_path):
    tiny.write_wikiqa(tmp_path, "test", 0, 7)
    spec = {"corpus": "wikiqa", "split": "test", "question_filter": "no_all_negative"}
    with pytest.raises(As2rayError, match="verify: false"):
        complete(PreparedTable(TableSpec(**spec), data_dir=str(tmp_path)))
    outputs, _ = complete(PreparedTable(TableSpec(**spec, verify=False), data_dir=str(tmp_path)))
    assert outputs["verified"] is False
    assert outputs["counts"]["num_questions"] == 7
    assert outputs["content"] == outputs["fingerprint"]  # so equal tables train one ranker


def test_release_that_was_corrected_at_the_same_size_is_refused(complete, tmp_path):
    tiny.write_wikiqa(tmp_path, "test", 0, 7)
    stage = PreparedTable(TableSpec("wikiqa", "test", verify=False), data_dir=str(tmp_path))
    stored = complete(stage)
    path = tmp_path / "WikiQA-test.tsv"
    path.touch()
    assert complete(stage) == stored
    path.write_bytes(path.read_bytes().replace(b"\t1\n", b"\t0\n", 1))
    with pytest.raises(StaleStageError, match=r"wikiqa/test has changed .*: WikiQA-test\.tsv"):
        complete(stage)


def test_change_of_a_file_that_a_split_is_joined_from_is_refused(tmp_path, monkeypatch):
    for name in ("run.tsv", "queries.tsv", "qrels.tsv"):
        (tmp_path / name).write_text(name)
    corpus = replace(
        get_corpus("wikiqa"),
        name="joined",
        files={"dev": ("run.tsv",)},
        joined_files={"dev": (("queries.tsv",), ("qrels.tsv",))},
    )
    monkeypatch.setitem(CORPORA, "joined", corpus)
    stage = PreparedTable(TableSpec("joined", "dev"), data_dir=str(tmp_path))
    files = release_files("joined", "dev", str(tmp_path))
    result, older = (
        Result("PreparedTable", "a", {"source": source})
        for source in (describe_files(files), {"run.tsv": 7})
    )
    stage.verify(result)
    (tmp_path / "qrels.tsv").write_text("QRELS.tsv")
    stage.verify(older)
    with pytest.raises(StaleStageError, match=r"joined/dev has changed .*: qrels\.tsv"):
        stage.verify(result)
    (tmp_path / "qrels.tsv").unlink()
    stage.verify(result)


@pytest.fixture
def labels(tmp_path):
    """A CSV file of 20 questions with five candidates each, under other names."""
    table = tiny.with_distinct_questions(tiny.candidates(20))
    columns = table.select(["question", "candidate", "label"]).rename_columns(["q", "text", "y"])
    csv.write_csv(columns, tmp_path / "labels.csv")
    return {
        "path": str(tmp_path / "labels.csv"),
        "columns": {"question": "q", "candidate": "text", "label": "y"},
        "split_shares": {"dev": 0.1, "test": 0.2},
    }


def test_table_of_a_file_is_split_by_question(complete, labels):
    tables = {
        split: read_table(complete(prepared_table(TableSpec(**labels, split=split), {}))[1])
        for split in ("train", "dev", "test", "")
    }
    assert {split: len(table) for split, table in tables.items()} == {
        "train": 70,
        "dev": 10,
        "test": 20,
        "": 100,
    }
    check_leaks({split: tables[split] for split in ("train", "dev", "test")})
    other = read_table(complete(prepared_table(TableSpec(**labels, split="dev", seed=1), {}))[1])
    assert other != tables["dev"]


def test_table_of_a_file_is_known_by_its_content_not_by_its_path(labels, tmp_path):
    stage = prepared_table(TableSpec(**labels), {})
    copy = shutil.copy(labels["path"], tmp_path / "copy.csv")
    assert prepared_table(TableSpec(**{**labels, "path": str(copy)}), {}) == stage
    with open(copy, "a") as file:
        file.write("new?,text,1\n")
    assert prepared_table(TableSpec(**{**labels, "path": str(copy)}), {}) != stage


def test_table_of_a_file_leaves_out_questions_of_held_out_tables(complete, labels):
    dev = prepared_table(TableSpec(**labels, split="dev"), {})
    rows = read_table(complete(prepared_table(TableSpec(**labels), {}, (dev,)))[1])
    assert len(rows) == 90


def test_hard_negatives_of_a_file_and_of_a_corpus(complete, labels, tmp_path):
    tiny.write_wikiqa(tmp_path, "test", 0, 7)
    corpus = {"corpus": "wikiqa", "split": "test", "verify": False}
    for spec in (labels, corpus):
        settings = {"max_negatives": 2, "hard_negatives": 1}
        every, hard, some, random = (
            read_table(complete(prepared_table(TableSpec(**each), {"wikiqa": str(tmp_path)}))[1])
            for each in (
                spec,
                {**spec, **settings},
                {**spec, **settings, "num_questions": 4},
                {**spec, "num_questions": 4},
            )
        )
        assert hard.equals(sample_questions(every, None, 2, hard_negatives=1))
        assert some["question_id"].unique() == random["question_id"].unique()
        assert 4 < len(some) < len(random)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "needs `corpus` and `split`, or `path`"),
        ({"corpus": "wikiqa"}, "needs `corpus` and `split`, or `path`"),
        ({"corpus": "wikiqa", "split": "test", "columns": {"question": "q"}}, "or `path`"),
        ({"corpus": "wikiqa", "path": "labels.csv"}, "and the path"),
        ({"path": "labels.csv", "split": "tset", "split_shares": {"test": 0.1}}, "split 'tset'"),
        ({"corpus": "wikqa", "split": "test"}, "did you mean 'wikiqa'"),
        ({"corpus": "wikiqa", "split": "tset"}, "did you mean 'test'"),
        (
            {"corpus": "wikiqa", "split": "test", "hard_negatives": 2},
            "more than max_negatives=None",
        ),
    ],
)
def test_table_of_two_sources_or_none_is_an_error(settings, problem):
    with pytest.raises(As2rayError, match=problem):
        TableSpec(**settings)


def test_table_of_a_file_that_is_missing_is_an_error_before_anything_runs(labels):
    stage = prepared_table(TableSpec(path=labels["path"].replace("labels", "label")), {})
    with pytest.raises(As2rayError, match=r"did you mean 'labels.csv'"):
        stage.check({})
