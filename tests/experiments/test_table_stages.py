"""Stages of candidates tables."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny
from pyarrow import csv

from as2ray.corpora import preparation
from as2ray.corpora.leaks import check_leaks
from as2ray.corpora.registry import CORPORA, get_corpus
from as2ray.corpora.sampling import flip_labels, sample_questions
from as2ray.corpora.verification import DATA_ROOT_VARIABLE
from as2ray.errors import As2rayError, CorpusError, LeakError, StaleStageError
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec
from as2ray.experiments.stage import Result
from as2ray.experiments.tables import (
    LeakCheck,
    PreparedTable,
    QuestionCheck,
    prepared_table,
    read_table,
    release_files,
    table_checks,
    table_stages,
)
from as2ray.tables.source_files import describe_files
from as2ray.training.job import ModelSpec


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


@pytest.mark.parametrize(
    ("root", "data_dir", "is_refused"),
    [(None, "default", True), ("set", "default", False), (None, "elsewhere", False)],
)
def test_release_that_is_missing_where_nobody_said_it_is_is_refused_before_anything_runs(
    tmp_path, monkeypatch, root, data_dir, is_refused
):
    monkeypatch.setattr(preparation, "data_root", lambda: tmp_path / "data")
    monkeypatch.delenv(DATA_ROOT_VARIABLE, raising=False)
    if root:
        monkeypatch.setenv(DATA_ROOT_VARIABLE, str(tmp_path / "data"))
    data_dirs = {} if data_dir == "default" else {"wikiqa": str(tmp_path / "elsewhere")}
    stage = prepared_table(TableSpec("wikiqa", "test"), data_dirs)
    if not is_refused:
        return stage.check({})
    with pytest.raises(CorpusError, match=rf"no WikiQA-test\.tsv in {tmp_path}/data/wikiqa"):
        stage.check({})
    tiny.write_wikiqa(tmp_path / "data" / "wikiqa", "test", 0, 7)
    stage.check({})


def test_dry_run_shows_of_a_table_its_split_size_and_where_it_is_or_is_missing(tmp_path, labels):
    stage = PreparedTable(TableSpec("wikiqa", "dev", "clean"), data_dir=str(tmp_path))
    missing, corpus = stage.describe(), get_corpus("wikiqa")
    assert (missing["data"], missing["pairs"]) == ("wikiqa/dev (clean)", "1,126")
    place = f"wikiqa ({corpus.license}): {tmp_path}"
    assert missing["source"].startswith(f"missing: {place}; put WikiQA-dev.tsv")
    tiny.write_wikiqa(tmp_path, "dev", 0, 7)
    assert stage.describe() == {**missing, "source": place}
    unknown = PreparedTable(TableSpec("dpr", "sample"), data_dir=str(tmp_path)).describe()
    assert unknown["pairs"] is None
    path = labels["path"]
    for split, name in (("dev", f"{path}/dev"), ("", path)):
        described = prepared_table(TableSpec(**labels, split=split), {}).describe()
        assert described == {"data": f"{name} (raw)", "source": f"table {path}"}


def test_table_that_loses_all_its_questions_is_an_error_that_names_it(complete, labels):
    tables = {name: prepared_table(TableSpec(**labels, split=name), {}) for name in ("dev", "")}
    spec = TableSpec(**labels, split="dev", question_filter="clean")
    with pytest.raises(CorpusError, match=r"labels\.csv/dev \(clean\): no question is left"):
        complete(replace(tables["dev"], spec=spec, without=(tables[""],)))


QUESTIONS = ("how far is the moon", "how far is the moon away", "who wrote the iliad")
"""The first two have five of six words in common."""


@pytest.mark.parametrize(
    ("similarity", "num_left"), [(None, 2), (0.9, 2), (0.75, 1)], ids=["equal", "0.9", "0.75"]
)
@pytest.mark.parametrize("source", ["file", "corpus"])
def test_questions_that_are_as_similar_to_held_out_ones_as_the_recipe_says_are_left_out(
    complete, tmp_path, monkeypatch, source, similarity, num_left
):
    monkeypatch.setattr("as2ray.corpora.corpus.Corpus.check_counts", lambda *_: False)
    held_out, train = (
        [{"question": q, "text": f"It is {n}.", "label": n} for q in questions for n in range(2)]
        for questions in (QUESTIONS[:1], QUESTIONS)
    )
    columns = {"question": "question", "candidate": "text", "label": "label"}
    for name, rows in (("held_out", held_out), ("train", train)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    header = "QuestionID\tQuestion\tDocumentID\tDocumentTitle\tSentenceID\tSentence\tLabel\n"
    lines = [
        f"Q{n // 2}\t{r['question']}\tD\tT\tD-{n}\t{r['text']}\t{r['label']}\n"
        for n, r in enumerate(train)
    ]
    (tmp_path / "WikiQA-train.tsv").write_text(header + "".join(lines))
    without = (
        prepared_table(TableSpec(path=str(tmp_path / "held_out.json"), columns=columns), {}),
    )
    spec = (
        TableSpec("wikiqa", "train")
        if source == "corpus"
        else TableSpec(path=str(tmp_path / "train.json"), columns=columns)
    )
    stage = prepared_table(spec, {"wikiqa": str(tmp_path)}, without, similarity)
    assert len(set(read_table(complete(stage)[1])["question"].to_pylist())) == num_left
    assert prepared_table(spec, {"wikiqa": str(tmp_path)}, (), similarity) == prepared_table(
        spec, {"wikiqa": str(tmp_path)}
    )


@pytest.fixture
def recipe(labels):
    tables = {name: TableSpec(**labels, split=name) for name in ("train", "dev", "test")}
    return Recipe(
        title="Leaks",
        model=ModelSpec("bert-base-uncased"),
        tables={**tables, "unused": TableSpec(**labels, seed=1)},
        dev="dev",
        tests=["test"],
        runs={"run": RunSpec(train=["train"])},
        baseline="run",
        min_leak_similarity=0.75,
    )


def test_questions_of_held_out_tables_are_looked_for_or_dropped_or_kept_in_training_tables(recipe):
    for on_leak in ("error", "drop", "keep"):
        given = replace(recipe, on_leak=on_leak)
        tables = table_stages(given, {})
        held_out, is_dropped = (tables["dev"], tables["test"]), on_leak == "drop"
        assert sorted(list(tables)[:2]) == ["dev", "test"]
        for name in ("train", "unused"):
            assert tables[name].without == (held_out if is_dropped else ())
            assert tables[name].min_leak_similarity == (0.75 if is_dropped else None)
        assert not any(table.without for table in held_out)
        questions = QuestionCheck(tables["test"], "clean", "test")
        leaks = LeakCheck({"train": tables["train"]}, dict(zip(("dev", "test"), held_out)), 0.75)
        expected = (leaks, questions) if on_leak == "error" else (questions,)
        assert table_checks(given, tables) == expected


def test_training_questions_that_are_similar_to_held_out_ones_are_refused(complete, tmp_path):
    tables = []
    for number, question in enumerate(QUESTIONS):
        rows = [{"question": question, "text": f"It is {n}.", "label": n} for n in range(2)]
        (tmp_path / f"{number}.json").write_text(json.dumps(rows))
        columns = {"question": "question", "candidate": "text", "label": "label"}
        path = str(tmp_path / f"{number}.json")
        tables.append(prepared_table(TableSpec(path=path, columns=columns), {}))
    complete(LeakCheck({"a": tables[0]}, {"b": tables[1], "c": tables[2]}))
    complete(LeakCheck({"a": tables[0]}, {"c": tables[2]}, 0.75))
    with pytest.raises(LeakError, match="'a' and 'b'"):
        complete(LeakCheck({"a": tables[0]}, {"c": tables[2], "b": tables[1]}, 0.75))


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


def test_labels_of_a_file_and_of_a_corpus_are_flipped_by_the_seed(complete, labels, tmp_path):
    tiny.write_wikiqa(tmp_path, "test", 0, 7)
    corpus = {"corpus": "wikiqa", "split": "test", "verify": False}
    for spec in (labels, corpus):
        every, noisy = (
            read_table(complete(prepared_table(TableSpec(**each), {"wikiqa": str(tmp_path)}))[1])
            for each in (spec, {**spec, "label_noise": 0.3, "seed": 4})
        )
        assert noisy.equals(flip_labels(every, 0.3, 4))


def test_file_of_a_table_is_found_from_every_working_folder(labels, tmp_path, monkeypatch):
    stage = prepared_table(TableSpec(**labels), {})
    monkeypatch.chdir(tmp_path)
    relative = prepared_table(TableSpec(**{**labels, "path": "labels.csv"}), {})
    monkeypatch.chdir("/")
    assert relative.spec.path == labels["path"]
    assert relative == stage
    hub = "hub:org/name:train"
    assert prepared_table(TableSpec(path=hub), {}).spec.path == hub


def test_table_of_pages_is_another_with_another_version_of_the_sentence_splitter():
    pages, sentences = (
        PreparedTable(TableSpec(name, "train"), data_dir="data") for name in ("squad", "wikiqa")
    )
    assert pages.identity({})["sentence_splitter"].startswith("syntok-")
    assert sentences.identity({})["sentence_splitter"] is None


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
