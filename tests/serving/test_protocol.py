"""Each dialect's requests and responses, over HTTP in process."""

import json
import shutil
import time
from itertools import pairwise
from uuid import UUID

import numpy as np
import pytest
from served import CANDIDATES, QUESTION

from as2ray.checkpoints.loading import load
from as2ray.models.encoder.families import FAMILIES
from as2ray.outputs import RankedCandidate
from as2ray.serving.protocol import CohereRequest, CohereResponse, TeiRequest, TeiScoredText
from as2ray.serving.types import CandidateScore, RerankResult


@pytest.fixture(scope="module")
def expected(cascade) -> list[RankedCandidate]:
    """The ranking that the ranker gives without a service."""
    return load(cascade, device="cpu").rank(QUESTION, CANDIDATES)


def falling(results, score="relevance_score") -> bool:
    scores = [one[score] for one in results]
    return scores == sorted(scores, reverse=True)


def test_rank_tells_scores_and_exit_layers_as_the_ranker_does(client, expected):
    asked = {"question": QUESTION, "candidates": CANDIDATES}
    found = client.post("/rank", json=asked).json()
    assert [one["index"] for one in found["ranking"]] == [one.index for one in expected]
    assert [one["exit_layer"] for one in found["ranking"]] == [one.exit_layer for one in expected]
    for got, wanted in zip(found["ranking"], expected):
        assert got["score"] == pytest.approx(wanted.score, abs=0.02)
        assert got["text"] == wanted.text
    assert found["exit_layers"] == [1, 2, 3]
    assert found["num_scored"] == [6, 3, 2]
    assert found["num_ranked"] == 6
    assert found["drop_ratios"] == [0.5, 0.5]
    assert found["load_shed"] is False
    assert found["num_tokens"] > len(CANDIDATES) * 3
    assert set(found["timings_ms"]) == {"tokenize", "queue", "inference"}


def test_rank_leaves_texts_out_on_request(client):
    asked = {"question": QUESTION, "candidates": CANDIDATES, "return_text": False}
    found = client.post("/rank", json=asked).json()
    assert {one["text"] for one in found["ranking"]} == {None}


@pytest.mark.parametrize(("drop", "survivors"), [(0.0, [6, 6, 6]), ([0.5, 0.0], [6, 3, 3])])
def test_rank_follows_the_drop_ratios_of_the_request(client, drop, survivors):
    asked = {"question": QUESTION, "candidates": CANDIDATES, "drop_ratios": drop, "top_k": 2}
    found = client.post("/rank", json=asked).json()
    assert found["num_scored"] == survivors
    assert len(found["ranking"]) == 2


@pytest.mark.parametrize("drop", [0.95, [0.5], [0.5, 0.95], -0.1, 1.0, "half", [0.1, 0.1, 0.1]])
def test_rank_refuses_drop_ratios_out_of_bounds(client, drop):
    asked = {"question": QUESTION, "candidates": CANDIDATES, "drop_ratios": drop}
    answer = client.post("/rank", json=asked)
    assert answer.status_code == 422
    assert set(answer.json()) == {"error", "message", "fix"}


def test_cohere_v2_gives_its_own_form_and_order(client, expected):
    asked = {"model": "rerank-v3.5", "query": QUESTION, "documents": CANDIDATES, "top_n": 3}
    answer = client.post("/v2/rerank", json=asked)
    found = answer.json()
    assert set(found) == {"id", "results", "meta"}
    assert all(set(one) == {"index", "relevance_score"} for one in found["results"])
    assert [one["index"] for one in found["results"]] == [one.index for one in expected[:3]]
    assert falling(found["results"])
    assert found["meta"]["api_version"] == {"version": "2"}
    assert answer.headers["x-model"] == "cascade"


def test_v1_answers_cohere_and_jina_at_once(client, expected):
    documents = [{"text": CANDIDATES[0], "title": "a"}, *CANDIDATES[1:]]
    asked = {"model": "m", "query": QUESTION, "documents": documents, "return_documents": True}
    found = client.post("/v1/rerank", json=asked).json()
    assert {"id", "meta", "model", "usage", "results"} == set(found)
    assert found["usage"]["total_tokens"] > 0
    assert [one["index"] for one in found["results"]] == [one.index for one in expected]
    by_index = {one["index"]: one["document"] for one in found["results"]}
    assert by_index[0] == {"text": CANDIDATES[0], "title": "a"}
    assert by_index[1] == {"text": CANDIDATES[1]}


def test_v1_without_return_documents_leaves_them_out(client):
    asked = {"query": QUESTION, "documents": CANDIDATES}
    found = client.post("/v1/rerank", json=asked).json()
    assert all(set(one) == {"index", "relevance_score"} for one in found["results"])


def test_v1_reads_the_rank_fields_of_objects(client):
    plain = {"query": QUESTION, "documents": ["a\nkovarin", "b\nmuri"]}
    fields = {
        "query": QUESTION,
        "documents": [{"x": "a", "y": "kovarin"}, {"x": "b", "y": "muri"}],
        "rank_fields": ["x", "y"],
    }
    first, second = (client.post("/v1/rerank", json=one).json() for one in (plain, fields))
    assert first["results"] == second["results"]


def test_v1_refuses_an_object_without_the_field(client):
    documents = [{"text": "lala"}, {"y": "muri"}]
    answer = client.post("/v1/rerank", json={"query": QUESTION, "documents": documents})
    assert answer.status_code == 422
    assert set(answer.json()) == {"message", "detail"}
    assert "document 1 has no field to rank; name its fields" in answer.json()["detail"]


def test_tei_gives_a_bare_list_with_texts_and_raw_scores(client, expected):
    asked = {"query": QUESTION, "texts": CANDIDATES, "return_text": True, "truncate": True}
    found = client.post("/rerank", json=asked).json()
    assert [one["index"] for one in found] == [one.index for one in expected]
    assert [one["text"] for one in found] == [one.text for one in expected]
    assert falling(found, "score")
    raw = client.post("/rerank", json={**asked, "raw_scores": True, "return_text": False}).json()
    assert all(set(one) == {"index", "score"} for one in raw)
    assert falling(raw, "score")
    scores = np.array([one["score"] for one in found])
    assert [one["score"] for one in raw] == pytest.approx(np.log(scores / (1 - scores)), abs=1e-5)


def test_rerank_with_documents_is_infinity_s_and_vllm_s(client, expected):
    asked = {"query": QUESTION, "documents": CANDIDATES, "return_documents": True}
    found = client.post("/rerank", json=asked).json()
    assert [one["index"] for one in found["results"]] == [one.index for one in expected]
    assert found["results"][0]["document"]["text"] == expected[0].text


def test_rerank_with_wrong_documents_is_refused_in_infinity_s_and_vllm_s_form(client):
    answer = client.post("/rerank", json={"query": QUESTION, "documents": [3]})
    assert (answer.status_code, set(answer.json())) == (422, {"message", "detail"})
    assert "documents.0" in answer.json()["detail"]


def test_what_clients_write_for_nothing_is_taken_as_left_out(client):
    asked = {"query": QUESTION, "texts": CANDIDATES, "truncate": None}  # TEI's may be null
    assert client.post("/rerank", json=asked).status_code == 200
    nothing = dict.fromkeys(
        ("model", "top_n", "return_documents", "rank_fields", "max_chunks_per_doc")
    )  # Cohere's v1 sends None as null
    body = {"query": QUESTION, "documents": CANDIDATES, **nothing}
    assert client.post("/v1/rerank", json=body).status_code == 200
    asked = {"query": QUESTION, "documents": CANDIDATES, "top_n": 0}  # vLLM's default
    assert len(client.post("/rerank", json=asked).json()["results"]) == len(CANDIDATES)


@pytest.mark.parametrize(
    ("family", "activation"),
    [
        *((family, "Identity") for family in sorted(FAMILIES)),
        # One of each kind of head: the activation comes after it.
        *((family, "Sigmoid") for family in ("bert", "modernbert", "qwen3")),
    ],
)
def test_each_family_scores_in_all_dialects_as_its_activation_says(
    serve, checkpoint, tmp_path, family, activation
):
    sizes = {"initializer_range": 0.3, "max_position_embeddings": 600}
    path = shutil.copytree(checkpoint(family, 1, **sizes), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    declared = {"activation_fn": f"torch.nn.modules.{activation}"}
    config["sentence_transformers"] = declared
    (path / "config.json").write_text(json.dumps(config))
    ranking = load(path, device="cpu").rank(QUESTION, CANDIDATES)
    order, scores = [one.index for one in ranking], [one.score for one in ranking]
    client = serve(models={"m": str(path)})
    info = client.get("/info").json()
    assert (info["family"], info["activation"]) == (family, activation.lower())
    assert info["head"] == config["architectures"][0]
    request_body = {"model": "m", "query": QUESTION, "documents": CANDIDATES}
    cohere = client.post("/v2/rerank", json=request_body).json()["results"]
    tei = client.post("/rerank", json={"query": QUESTION, "texts": CANDIDATES}).json()
    as2ray_response = client.post(
        "/rank", json={"question": QUESTION, "candidates": CANDIDATES}
    ).json()
    for results, name in (
        (cohere, "relevance_score"),
        (tei, "score"),
        (as2ray_response["ranking"], "score"),
    ):
        assert [one["index"] for one in results] == order
        assert [one[name] for one in results] == pytest.approx(scores, abs=1e-5)
    is_probability = [0 <= score <= 1 for score in scores]
    assert all(is_probability) if activation == "Sigmoid" else not all(is_probability)
    # A budget changes neither what a score is nor what its logit is.
    body = {"query": QUESTION, "texts": CANDIDATES, "raw_scores": True}
    raw, raw_in_time = (
        {one["index"]: one["score"] for one in client.post("/rerank", json=body, headers=h).json()}
        for h in ({}, {"x-budget-ms": "600000"})
    )
    assert raw_in_time == pytest.approx(raw, abs=0.05)
    body = {"question": QUESTION, "candidates": CANDIDATES, "budget_ms": 600_000}
    in_time = client.post("/rank", json=body).json()["ranking"]
    assert {one["is_logit"] for one in in_time} == {activation == "Identity"}


def test_scores_of_foreign_dialects_fall_though_the_dropped_scored_higher():
    scores = [0.4, 0.9, 0.4, 0.3, 0.0, 0.0]
    ranking = [CandidateScore(index, score, 3) for index, score in enumerate(scores)]
    answer, texts = RerankResult("m", ranking, 9), ["a"] * len(scores)
    cohere = CohereResponse.from_result(
        answer, CohereRequest(model="m", query="q", documents=texts)
    )
    for raw in (False, True):
        found = TeiScoredText.all_from_result(
            answer, TeiRequest(query="q", texts=texts, raw_scores=raw)
        )
        assert all(a.score > b.score for a, b in pairwise(found))
    told = [one.relevance_score for one in cohere.results]
    assert all(np.float32(a) > np.float32(b) for a, b in pairwise(told))
    assert told == pytest.approx([0.4, 0.4, 0.4, 0.3, 0.0, 0.0])


BODIES = {
    "/v2/rerank": {"model": "m", "query": QUESTION, "documents": CANDIDATES},
    "/v1/rerank": {"query": QUESTION, "documents": CANDIDATES},
    "/rerank": {"query": QUESTION, "texts": CANDIDATES},
    "/rank": {"question": QUESTION, "candidates": CANDIDATES},
}


@pytest.mark.parametrize("path", BODIES)
def test_ample_budget_of_any_dialect_ranks_as_none_does(client, path):
    without = client.post(path, json=BODIES[path])
    within = client.post(path, json=BODIES[path], headers={"x-budget-ms": "60000"})
    assert "x-budget-exceeded-ms" not in without.headers
    assert within.headers["x-budget-exceeded-ms"] == "0"
    listed = [response.json() for response in (without, within)]
    results = [r if path == "/rerank" else r.get("results", r.get("ranking")) for r in listed]
    before, after = ([r["index"] for r in each] for each in results)
    assert before == after
    assert within.headers["x-compute-tokens"] == without.headers["x-compute-tokens"]


@pytest.mark.parametrize("path", BODIES)
def test_budget_that_is_over_gives_all_candidates_in_their_order(client, path):
    response = client.post(path, json=BODIES[path], headers={"x-budget-ms": "0.001"})
    assert response.status_code == 200
    result = response.json()
    results = result if path == "/rerank" else result.get("results", result.get("ranking"))
    assert [each["index"] for each in results] == list(range(len(CANDIDATES)))
    assert float(response.headers["x-budget-exceeded-ms"]) > 0


def test_each_response_of_cohere_s_dialect_has_an_id_of_its_own(client):
    ids = [client.post("/v2/rerank", json=BODIES["/v2/rerank"]).json()["id"] for _ in range(2)]
    assert len({UUID(each) for each in ids}) == 2


def test_rank_tells_how_far_a_budget_reached(client):
    body = {**BODIES["/rank"], "budget_ms": 60_000}
    ample = client.post("/rank", json=body).json()
    assert (ample["budget_ms"], ample["budget_exceeded_ms"]) == (60_000, 0.0)
    assert {each["exit_layer"] for each in ample["ranking"]} == {1, 2, 3}
    body["budget_ms"] = 0.001
    # The field of a request goes before the header.
    started_at = time.perf_counter()
    over = client.post("/rank", json=body, headers={"x-budget-ms": "60000"}).json()
    assert over["budget_ms"] == 0.001
    assert 0 < over["budget_exceeded_ms"] < 1e3 * (time.perf_counter() - started_at)
    assert {each["exit_layer"] for each in over["ranking"]} == {0}
    assert over["num_scored"] == [0, 0, 0]
    none = client.post("/rank", json=BODIES["/rank"]).json()
    assert (none["budget_ms"], none["budget_exceeded_ms"]) == (None, None)


FORMS = {
    "/v2/rerank": {"message"},
    "/v1/rerank": {"message", "detail"},
    "/rerank": {"error", "error_type"},
    "/rank": {"error", "message", "fix"},
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("body", "code"), [(b"{", 400), (b"{}", 422), (b"[]", 422), (b"null", 422), (b"\xff", 400)]
)
def test_an_unreadable_request_is_refused_in_each_dialect_s_form(client, path, body, code):
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, set(answer.json())) == (code, FORMS[path])


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("budget", ["0", "-5", "nan", "inf", "soon", ""])
def test_budget_that_is_no_number_above_0_is_refused(client, path, budget):
    answer = client.post(path, json=BODIES[path], headers={"x-budget-ms": budget})
    assert (answer.status_code, set(answer.json())) == (422, FORMS[path])
    assert "above 0" in answer.text


@pytest.mark.parametrize("budget", [0, -5, "50", True])
def test_budget_field_that_is_no_number_above_0_is_refused(client, budget):
    answer = client.post("/rank", json={**BODIES["/rank"], "budget_ms": budget})
    assert answer.status_code == 422
    assert "budget_ms" in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/rerank", {"model": "m", "query": QUESTION, "documents": []}),
        ("/v1/rerank", {"query": QUESTION, "documents": []}),
        ("/rerank", {"query": QUESTION, "texts": []}),
        ("/rank", {"question": QUESTION, "candidates": []}),
    ],
)
def test_no_candidates_are_refused_in_each_dialect_s_form(client, path, body):
    answer = client.post(path, json=body)
    assert (answer.status_code, set(answer.json())) == (400, FORMS[path])
    if path == "/rerank":
        assert answer.json()["error_type"] == "Empty"


def test_info_health_and_metrics_speak_tei(client):
    info = client.get("/info").json()
    assert info["model_id"] == "cascade"
    assert info["model_dtype"] in ("bf16", "fp32")
    assert info["max_input_length"] == 60
    assert info["exit_layers"] == [1, 2, 3]
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").headers["content-type"].startswith("text/plain")


def test_times_stand_in_the_headers(client):
    headers = client.post("/rerank", json={"query": QUESTION, "texts": CANDIDATES}).headers
    for name in ("total", "tokenization", "queue", "inference"):
        assert int(headers[f"x-{name}-time"]) >= 0
    assert int(headers["x-compute-tokens"]) > 0
    assert headers["x-drop-ratios"] == "0.5,0.5"
    assert headers["x-load-shed"] == "false"


def test_a_name_is_free_where_one_model_is_served_and_bound_where_several(serve, cascade):
    several = serve(models={"one": cascade, "two": cascade})
    asked = {"query": QUESTION, "documents": CANDIDATES}
    assert several.post("/v1/rerank", json=asked).json()["model"] == "one"
    assert several.post("/v1/rerank", json={**asked, "model": "two"}).json()["model"] == "two"
    answer = several.post("/v1/rerank", json={**asked, "model": "three"})
    assert (answer.status_code, set(answer.json())) == (404, {"message", "detail"})
    texts = {"query": QUESTION, "texts": CANDIDATES, "model": "two"}  # not of TEI, which serves one
    assert several.post("/rerank", json=texts).headers["x-model"] == "two"
    assert several.post("/rerank", json={**texts, "model": "three"}).status_code == 404
    assert several.get("/info").json()["models"] == ["one", "two"]
