"""Questions that are made from documents, and those that a user gives."""

import shutil

import pyarrow.compute as pc
import pytest
import tiny

from as2ray.errors import ConfigError, CorpusError, LeakError, StaleStageError
from as2ray.experiments.documents import GeneratedQueries, GivenQueries, labeled_tables
from as2ray.experiments.indexes import DocumentIndex
from as2ray.experiments.queries import read_queries
from as2ray.experiments.tables import read_table
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.pseudo_labels import Query


def test_questions_of_a_generator_that_has_changed_are_refused_and_of_one_that_is_gone_kept(
    documents, tmp_path, seq2seq, complete
):
    index = DocumentIndex.from_documents(documents, IndexConfig())
    generator = shutil.copytree(seq2seq, tmp_path / "generator")
    stage = GeneratedQueries(index, ("generator",), 4, str(generator))
    outputs = complete(stage)
    (generator / "config.json").write_text("{}")
    with pytest.raises(StaleStageError, match="has changed since it generated questions"):
        complete(stage)
    shutil.rmtree(generator)
    assert complete(stage) == outputs


def test_questions_of_headings_are_stored_once_each(documents, complete):
    index = DocumentIndex.from_documents(documents, IndexConfig())
    stage = GeneratedQueries(index, ("headings",), None)
    outputs, folder = complete(stage)
    assert outputs == {"num_questions": len(tiny.TOPICS), "generator": None}
    assert {query.text for query in read_queries(folder)} == {
        f"All about {topic}" for topic in tiny.TOPICS
    }
    assert complete(GeneratedQueries(index, ("headings",), 2))[0]["num_questions"] == 2
    assert stage.describe() == {"data": "headings", "source": None}
    both = GeneratedQueries(index, ("headings", "words"), None)
    assert both.describe()["data"] == "headings+words"
    assert GeneratedQueries(index, ("generator",), 4, "t5").describe() == {
        "data": "t5",
        "source": "model t5",
    }


def test_one_generated_question_is_too_few(complete, tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "one.md").write_text("# All about owls\n\nThey hunt mice at night.")
    index = DocumentIndex.from_documents(tmp_path / "documents", IndexConfig())
    with pytest.raises(ConfigError, match=r"only 1 questions were made from \['headings'\]"):
        complete(GeneratedQueries(index, ("headings",), None))


def test_questions_of_a_user_are_known_by_their_texts(complete):
    queries = [Query("a", "who?"), Query("b", "why?", 3)]
    stage = GivenQueries.from_queries(queries)
    assert stage == GivenQueries.from_queries(list(queries))
    assert stage != GivenQueries.from_queries([Query("a", "who?"), Query("b", "when?")])
    outputs, folder = complete(stage)
    assert outputs["num_questions"] == 2
    assert read_queries(folder) == queries


def test_tables_of_a_user_are_copied_and_have_both_labels_and_their_own_questions(
    complete, tmp_path
):
    table = tiny.with_distinct_questions(tiny.candidates(4))
    tiny.write_corpus(tmp_path / "train", table.slice(0, 10))
    tiny.write_corpus(tmp_path / "dev", table.slice(10))
    paths = {name: str(tmp_path / name) for name in ("train", "dev")}
    tables = labeled_tables(paths)
    assert list(tables) == ["train", "dev"]
    outputs, folder = complete(tables["dev"])
    assert read_table(folder) == table.slice(10)
    assert outputs["counts"]["num_pairs"] == 10
    tiny.write_corpus(tmp_path / "same", table.slice(10))
    assert labeled_tables({"dev": str(tmp_path / "same")})["dev"] == tables["dev"]
    with pytest.raises(LeakError, match="2 questions in both 'dev' and 'test'"):
        labeled_tables({"dev": paths["dev"], "test": str(tmp_path / "same")})
    positives = table.filter(pc.equal(table["label"], 1))
    for label, rows in ((1, positives), (0, table.filter(pc.equal(table["label"], 0)))):
        folder = tiny.write_corpus(tmp_path / f"only-{label}", rows)
        with pytest.raises(CorpusError, match="it needs both labels"):
            labeled_tables({"train": str(folder)})
