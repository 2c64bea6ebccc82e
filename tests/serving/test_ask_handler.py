"""`/ask`: from documents to answers over HTTP."""

import asyncio
import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.question_answering import QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.ask_handler import AskHandler
from as2ray.serving.protocol import AskRequest
from as2ray.serving.settings import Limits
from as2ray.serving.types import CandidateScore, ModelInfo, RerankRequest, RerankResult


@pytest.fixture(scope="module")
def library(serve, index):
    return serve(index_path=index)


def test_answers_are_those_of_the_answerer_with_their_place(library, index, cascade):
    told = library.post("/ask", json={"question": "what is kovarin", "top_k": 2}).json()
    ranker = load(cascade, device="cpu")
    expected = QuestionAnswerer(SentenceIndex.open(index), ranker).ask("what is kovarin", 2)
    assert [(a["text"], a["document_id"]) for a in told["answers"]] == [
        (a.text, a.document_id) for a in expected.answers
    ]
    assert told["num_candidates"] == expected.num_candidates == 2
    assert told["answers"][0]["score"] == pytest.approx(expected.best_score, abs=0.02)
    assert told["answers"][0]["document_id"] == "one.txt"
    assert told["num_scored"][0] == told["num_ranked"] == 2
    assert set(told["timings_ms"]) == {"retrieval", "tokenize", "queue", "inference"}


def test_document_of_an_answer_is_given_whole_with_its_paragraphs(library, monkeypatch):
    answer = library.post("/ask", json={"question": "kovarin"}).json()["answers"][0]
    document = library.get(f"/documents/{answer['document_id']}").json()
    texts = [paragraph["text"] for paragraph in document["paragraphs"]]
    assert texts == [
        "Kovarin ne badesso. Muri kovarin lala.",
        "Quintol ba ne. Zelimut lala ne muri.",
    ]
    assert any(answer["text"] in text for text in texts)
    assert (document["document_id"], document["is_complete"]) == ("one.txt", True)
    monkeypatch.setattr("as2ray.serving.app.MAX_PARAGRAPHS", 1)
    document = library.get("/documents/one.txt").json()
    assert (len(document["paragraphs"]), document["is_complete"]) == (1, False)
    monkeypatch.undo()
    monkeypatch.setattr("as2ray.serving.app.MAX_DOCUMENT_CHARS", len(texts[0]) + 7)
    document = library.get("/documents/one.txt").json()
    assert [each["text"] for each in document["paragraphs"]] == [texts[0], texts[1][:7]]
    assert not document["is_complete"]


@pytest.mark.parametrize("name", ["two\nlines.txt", "a/b #? é.txt"])
def test_document_of_any_name_is_given(serve, tmp_path, name):
    path = tmp_path / "library" / name
    path.parent.mkdir(parents=True)
    path.write_text("A zebra has stripes.")
    write_index(tmp_path / "library", tmp_path / "index")
    library = serve(index_path=str(tmp_path / "index"))
    [answer] = library.post("/ask", json={"question": "zebra"}).json()["answers"]
    response = library.get(f"/documents/{quote(answer['document_id'], safe='')}")
    assert (response.status_code, response.json()["document_id"]) == (200, name)
    assert library.get("/documents/nothing").json()["error"] == "not_found"


def test_document_that_is_not_in_the_index_is_not_found(library, client):
    response = library.get("/documents/notes/../two.txt")
    assert (response.status_code, response.json()["error"]) == (404, "not_found")
    assert client.get("/documents/one.txt").status_code == 404  # without an index no such path


def test_threshold_of_the_ranker_is_taken_where_a_request_has_none(serve, index):
    library, body = serve(index_path=index), {"question": "what is kovarin"}
    assert library.post("/ask", json=body).json()["answers"]
    assert library.get("/info").json()["threshold"] is None
    library.service.engines["cascade"].ranker.threshold = 1.0
    assert library.get("/info").json()["threshold"] == 1.0
    assert library.post("/ask", json=body).json()["answers"] == []
    assert library.post("/ask", json={**body, "threshold": 0.0}).json()["answers"]


def test_threshold_without_a_score_is_refused_as_by_the_answerer(serve, index):
    client = serve(index_path=index, models={})
    body = {"question": "what is kovarin"}
    refused = client.post("/ask", json={**body, "threshold": 0.9})
    assert (refused.status_code, refused.json()["error"]) == (422, "invalid_request")
    assert "threshold of 0.9 needs a probability" in refused.json()["message"]
    assert client.post("/ask", json={**body, "threshold": 0.0}).json()["answers"]


def test_nothing_is_answered_below_the_threshold_or_without_a_word(library):
    told = library.post("/ask", json={"question": "kovarin", "threshold": 1.0}).json()
    assert (told["answers"], told["nearest"][0]["document_id"]) == ([], "one.txt")
    assert "an answer needs 1.0000" in told["reason"]
    assert 0 < told["best_score"] < 1
    told = library.post("/ask", json={"question": "zebra"}).json()
    assert (told["answers"], told["num_candidates"], told["best_score"]) == ([], 0, None)
    assert (told["nearest"], told["reason"][:11]) == ([], "no sentence")


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 0},
        {"num_neighbors": 99},
        {"threshold": 2},
        {"unknown": 1},
        {"question": " "},
        {"question": "zebra", "drop_ratios": 0.99},
        {"budget_ms": 0},
    ],
)
def test_what_cannot_be_asked_is_refused(library, wrong):
    answer = library.post("/ask", json={"question": "kovarin", **wrong})
    assert answer.status_code == 422
    assert {"error", "message", "fix"} <= answer.json().keys()


def test_half_a_character_is_refused(library):
    body = json.dumps({"question": "\ud800"})
    answer = library.post("/ask", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]) == (422, "invalid_request")


def test_too_long_a_question_is_refused_before_it_is_looked_for(serve, index):
    client = serve(index_path=index, limits={"max_text_chars": 60})
    answer = client.post("/ask", json={"question": "zebra " * 100})
    assert (answer.status_code, answer.json()["error"]) == (413, "too_large")


def test_drop_ratios_and_models_are_as_in_rank(library):
    asked = {"question": "kovarin lala ne", "drop_ratios": 0.5}
    told = library.post("/ask", json=asked).json()
    assert told["drop_ratios"] == [0.5, 0.5]
    assert library.post("/ask", json={**asked, "drop_ratios": 0.99}).status_code == 422


def test_budget_is_as_in_rank_and_counts_the_retrieval(library):
    body = {"question": "what is kovarin", "threshold": 0.0}
    none = library.post("/ask", json=body).json()
    ample = library.post("/ask", json={**body, "budget_ms": 60_000}).json()
    assert ample["answers"] == none["answers"]
    assert ample["budget_exceeded_ms"] == 0.0
    for budget in ({"json": {**body, "budget_ms": 0.001}}, {"headers": {"x-budget-ms": "0.001"}}):
        over = library.post("/ask", **{"json": body, **budget}).json()
        assert over["budget_exceeded_ms"] > over["timings_ms"]["retrieval"]
        assert {answer["exit_layer"] for answer in over["answers"]} == {0}
        assert over["best_score"] is None  # of a score that nobody computed
    wrong = library.post("/ask", json={"question": "zebra"}, headers={"x-budget-ms": "0"})
    assert wrong.status_code == 422


def test_budget_without_time_for_the_ranker_tells_so_where_a_threshold_needs_its_score(library):
    body = {"question": "what is kovarin", "threshold": 0.3, "budget_ms": 0.001}
    told = library.post("/ask", json=body).json()
    assert (told["answers"], told["best_score"]) == ([], None)
    assert (
        told["reason"] == "the ranker did not score the best sentence, and an answer needs 0.3000"
    )
    assert told["nearest"]


def test_budget_of_a_question_for_which_nothing_is_ranked_is_told_too(serve, library, index):
    alone = serve(index_path=index, models={})
    for client, question in ((alone, "what is kovarin"), (library, "zebra")):
        for budget_ms, is_exceeded in ((0.001, True), (60_000, False)):
            body = {"question": question, "budget_ms": budget_ms}
            response = client.post("/ask", json=body)
            answer = response.json()
            assert (answer["num_ranked"], answer["budget_ms"]) == (0, budget_ms)
            assert (answer["budget_exceeded_ms"] > 0) is is_exceeded
            exceeded_ms = float(response.headers["x-budget-exceeded-ms"])
            assert exceeded_ms == pytest.approx(answer["budget_exceeded_ms"], rel=1e-4)
        assert client.post("/ask", json={"question": question}).json()["budget_ms"] is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": "default"}, "model"),
        ({"drop_ratios": 0.5}, "drop_ratios"),
        ({"drop_ratios": [], "model": "a"}, "model and drop_ratios"),
    ],
)
def test_settings_of_a_ranker_are_refused_without_one(serve, index, settings, named):
    client = serve(index_path=index, models={})
    response = client.post("/ask", json={"question": "kovarin", **settings})
    assert response.status_code == 422
    assert response.json() == {
        "error": "invalid_request",
        "message": f"the service has no ranker, so it cannot use {named}",
        "fix": f"leave out {named}",
    }
    assert client.post("/ask", json={"question": "kovarin", "model": None}).status_code == 200


def test_index_without_a_model_is_asked_as_by_the_answerer_and_ranks_nothing(serve, index):
    client = serve(index_path=index, models={})
    body = {"question": "what is kovarin", "top_k": 2, "budget_ms": 500}
    response = client.post("/ask", json=body).json()
    expected = QuestionAnswerer(SentenceIndex.open(index)).ask("what is kovarin", 2)
    assert [(a["text"], a["score"]) for a in response["answers"]] == [
        (a.text, pytest.approx(a.score)) for a in expected.answers
    ]
    info = client.get("/info").json()
    assert (info["models"], info["model_id"], info["num_indexed_sentences"]) == ([], "", 4)
    assert client.get("/ready").status_code == 200
    refused = client.post("/rank", json={"question": "q", "candidates": ["a"]})
    assert (refused.status_code, refused.json()["error"]) == (404, "model_not_found")
    assert "use `/ask`" in refused.json()["fix"]


def test_info_counts_the_sentences_and_without_an_index_nobody_asks(library, client):
    assert library.get("/info").json()["num_indexed_sentences"] == 4
    assert client.get("/info").json()["num_indexed_sentences"] == 0
    assert client.post("/ask", json={"question": "kovarin"}).status_code == 404


@pytest.mark.parametrize("min_similarity", [None, 1.1])
def test_fitted_scores_are_those_of_the_answerer(
    serve, index, cascade, sentence_encoder, tmp_path, min_similarity
):
    folder = Path(index).parent
    config = IndexConfig(encoder=sentence_encoder)
    write_index(folder / "notes", tmp_path / "i", config, load_encoder=load_sentence_encoder)
    opened = SentenceIndex.open(tmp_path / "i", load_sentence_encoder)
    model = shutil.copytree(cascade, tmp_path / "model")
    scoring = AnswerScoring(
        {"similarity": 1.0, "ranker": 0.5},
        max_similarity_gap=0.0,
        min_similarity=min_similarity,
        encoder=opened.embeddings.info.fingerprint,
    )
    scoring.write(model)
    client = serve(index_path=str(tmp_path / "i"), models={"adapted": str(model)})
    told = client.post("/ask", json={"question": "what is kovarin", "top_k": 4}).json()
    ranker = load(cascade, device="cpu")
    expected = QuestionAnswerer(opened, ranker, scoring=scoring).ask("what is kovarin", 4)
    assert [(a["text"], a["exit_layer"]) for a in told["answers"]] == [
        (a.text, a.exit_layer) for a in expected.answers
    ]
    assert [a["text"] for a in told["nearest"]] == [a.text for a in expected.nearest]
    assert len(told["nearest"]) == (0 if min_similarity is None else 1)
    assert told["num_candidates"] > told["num_ranked"] == told["num_scored"][0] == 1
    client.service.engines["adapted"].ranker.threshold = 0.0  # as a calibrated ranker has
    again = client.post("/ask", json={"question": "what is kovarin", "top_k": 4}).json()
    assert again["reason"] == told["reason"]
    if min_similarity is None:
        assert told["reason"] is None
        assert [a["exit_layer"] for a in told["answers"]][1:] == [0, 0, 0]
    else:
        assert told["answers"] == []
        assert "the documents are on other subjects" in told["reason"]


def test_model_that_replaces_another_while_answers_are_found_does_not_rank_them(index):
    class Service:
        def __init__(self) -> None:
            self.models = {"m": "before"}

        async def get_model_info(self, model: str) -> ModelInfo:
            self.models = {"m": "after"}
            return ModelInfo(60, (), ())

    async def rank(request: RerankRequest) -> RerankResult:
        assert request.checkpoint == "before"
        ranking = [CandidateScore(i, 0.5) for i in range(len(request.candidates))]
        return RerankResult("m", ranking, 0)

    handler = AskHandler(SentenceIndex.open(index), Service(), Limits())
    answer = asyncio.run(handler.ask(AskRequest(question="kovarin"), "m", rank))
    assert answer.answers


def test_index_of_another_encoder_than_the_model_was_adapted_to_is_told(serve, index):
    client = serve(index_path=index)
    scoring = AnswerScoring({"similarity": 1.0}, encoder="another")
    client.service.engines["cascade"].answer_scoring = scoring
    response = client.post("/ask", json={"question": "kovarin"})
    assert (response.status_code, response.json()["error"]) == (503, "unavailable")
    assert "another encoder" in response.json()["message"]


def test_encoder_is_loaded_before_the_first_question(sentence_encoder, tmp_path):
    (tmp_path / "notes.txt").write_text("A kovarin sleeps. It eats ferns.")
    config = IndexConfig(encoder=sentence_encoder)
    write_index(tmp_path / "notes.txt", tmp_path / "i", config, load_encoder=load_sentence_encoder)
    index = SentenceIndex.open(tmp_path / "i", load_sentence_encoder)
    AskHandler(index, None, Limits())
    assert "encoder" in vars(index.embeddings)
