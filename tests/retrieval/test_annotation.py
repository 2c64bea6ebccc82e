import pytest

from as2ray.checkpoints.loading import load
from as2ray.errors import EvaluationError
from as2ray.retrieval.annotation import CandidateLister
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.schema import MAX_TEXT_CHARS

QUESTION = "Which owls hunt mice?"
TEXTS = {
    "a": "Owls hunt mice. Owls sleep. Rain falls.",
    "b": "Mice eat owls. Owls sleep.",
    "c": "Snow melts.",
}


@pytest.fixture
def index(tmp_path):
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / f"{name}.txt").write_text(text)
    write_index(tmp_path / "docs", tmp_path / "i", num_shards=2)
    return SentenceIndex.open(tmp_path / "i")


def test_all_sentences_of_the_documents_are_listed_by_bm25_and_equal_texts_once(index):
    listed = list(CandidateLister(index).list_candidates(["What is ice?", QUESTION]))
    assert listed[0].question_id == "q1"  # nothing is known of ice
    assert [c.candidate_id for c in listed] == [f"q1-{n}" for n in range(4)]
    assert {c.question for c in listed} == {QUESTION}
    assert [(c.candidate, c.document_id, c.label) for c in listed] == [
        ("Owls hunt mice.", "a.txt", ""),
        ("Mice eat owls.", "b.txt", ""),
        ("Owls sleep.", "a.txt", ""),
        ("Rain falls.", "a.txt", ""),
    ]
    scores = index.score_sentences(QUESTION)
    assert [c.score for c in listed] == [float(scores[row]) for row in (0, 3, 1, 2)]
    assert next(CandidateLister(index).list_candidates(["Snow?"])).candidate == "Snow melts."


def test_candidates_of_equal_scores_come_in_the_order_of_the_documents(tmp_path):
    texts = [f"Rain falls on day {n}." for n in range(40)]
    (tmp_path / "a.txt").write_text(" ".join([*texts, "Owls hunt."]))
    write_index(tmp_path / "a.txt", tmp_path / "i")
    listed = CandidateLister(SentenceIndex.open(tmp_path / "i")).list_candidates(["Owls?"])
    assert [c.candidate for c in listed] == ["Owls hunt.", *texts]


def test_long_sentence_is_cut_to_what_a_table_may_hold(tmp_path):
    (tmp_path / "a.txt").write_text("Owls " + "o" * MAX_TEXT_CHARS)
    write_index(tmp_path / "a.txt", tmp_path / "i")
    (listed,) = CandidateLister(SentenceIndex.open(tmp_path / "i")).list_candidates(["Owls?"])
    assert len(listed.candidate) == MAX_TEXT_CHARS


def test_documents_and_candidates_are_no_more_than_asked(index):
    few = CandidateLister(index, num_documents=1, top_k=2).list_candidates([QUESTION])
    assert [c.candidate for c in few] == ["Owls hunt mice.", "Owls sleep."]


def test_ranker_orders_the_list(index, checkpoint):
    ranker = load(checkpoint("bert", 2), device="cpu", dtype="fp32")
    texts = ["Owls hunt mice.", "Owls sleep.", "Rain falls.", "Mice eat owls."]
    lister = CandidateLister(index, ranker, top_k=3)
    listed = list(lister.list_candidates([QUESTION, "What is ice?"]))
    ranking = {c.text: c.score for c in ranker.rank(QUESTION, texts)}
    assert [c.score for c in listed] == sorted(ranking.values(), reverse=True)[:3]
    assert [ranking[c.candidate] for c in listed] == [c.score for c in listed]


def test_blank_question_is_refused(index):
    with pytest.raises(EvaluationError):
        list(CandidateLister(index).list_candidates([" "]))
