"""The bound below which questions are on another subject, fitted without labels."""

import json

import numpy as np
import pytest

import as2ray
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.retrieval import subject_bound
from as2ray.retrieval.answer_fitting import OFF_TOPIC_SHARE
from as2ray.retrieval.index_writer import MANIFEST, IndexConfig, write_index
from as2ray.retrieval.query_generation import generate_queries
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.retrieval.subject_bound import share_on_subject, store_min_similarity


@pytest.fixture
def folder(documents, sentence_encoder, tmp_path):
    """An index with embeddings of five small documents."""
    config = IndexConfig(encoder=sentence_encoder)
    write_index(documents, tmp_path / "i", config, load_encoder=load_sentence_encoder)
    return tmp_path / "i"


def nearest(index: SentenceIndex, questions: list[str]) -> list[float]:
    return index.embeddings.nearest_similarities(questions)


def test_share_on_subject_is_that_of_questions_that_a_sentence_is_similar_to(folder):
    index = SentenceIndex.open(folder, load_sentence_encoder)
    questions = ["Whales", "Penguins cannot fly.", "What is zelimut?"]
    similarities = nearest(index, questions)
    assert share_on_subject(index, questions, max(similarities)) == pytest.approx(1 / 3)
    assert share_on_subject(index, questions, sorted(similarities)[1]) == pytest.approx(2 / 3)
    assert share_on_subject(index, questions, 2.0) == 0.0


def test_bound_is_stored_that_questions_of_general_knowledge_miss(folder, monkeypatch, tmp_path):
    off_topic = tmp_path / "questions.txt"
    off_topic.write_text("Wer malte die Brücke?\nWho?\n", encoding="utf-8")
    monkeypatch.setattr(subject_bound, "OFF_TOPIC_QUESTIONS", off_topic)
    monkeypatch.setattr(subject_bound, "NUM_QUESTIONS", 3)
    before = json.loads((folder / MANIFEST).read_text())
    bound = store_min_similarity(folder, load_sentence_encoder)["min_similarity"]
    index = SentenceIndex.open(folder, load_sentence_encoder)
    own = nearest(index, [query.text for query in generate_queries(index, max_questions=3)])
    others = nearest(index, ["Wer malte die Brücke?", "Who?"])
    assert bound == pytest.approx(min(*own, np.quantile(others, 1 - OFF_TOPIC_SHARE)))
    assert json.loads((folder / MANIFEST).read_text()) == {**before, "min_similarity": bound}


def test_no_bound_is_stored_where_documents_give_no_question(sentence_encoder, tmp_path):
    (tmp_path / "a.txt").write_text("Owls.")
    config = IndexConfig(encoder=sentence_encoder)
    write_index(tmp_path / "a.txt", tmp_path / "i", config, load_encoder=load_sentence_encoder)
    stored = store_min_similarity(tmp_path / "i", load_sentence_encoder)
    assert stored["min_similarity"] is None
    assert json.loads((tmp_path / "i" / MANIFEST).read_text())["min_similarity"] is None


def test_encoder_is_loaded_once(documents, sentence_encoder, tmp_path):
    loaded = []

    def load(name):
        loaded.append(name)
        return load_sentence_encoder(name)

    config, options = IndexConfig(encoder=sentence_encoder), {"with_subject_bound": True}
    write_index(documents, tmp_path / "i", config, load_encoder=load, **options)
    assert loaded == [sentence_encoder]


def test_index_appears_with_its_bound_or_not_at_all(
    documents, sentence_encoder, tmp_path, monkeypatch
):
    monkeypatch.setattr(subject_bound, "generate_queries", interrupt)
    with pytest.raises(KeyboardInterrupt):
        as2ray.index(documents, tmp_path / "i", encoder=sentence_encoder)
    monkeypatch.undo()
    assert not (tmp_path / "i").exists()
    index = as2ray.index(documents, tmp_path / "i", encoder=sentence_encoder)
    assert index.manifest["min_similarity"] is not None
    assert {path.name for path in tmp_path.iterdir()} == {"documents", "i"}


def interrupt(*_, **__):
    raise KeyboardInterrupt
