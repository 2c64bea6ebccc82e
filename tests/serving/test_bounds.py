"""What is refused, in whose form, and what never gets out."""

import json
from itertools import product

import pytest
from served import CANDIDATES, QUESTION

from as2ray.errors import ConfigError
from as2ray.serving import middleware
from as2ray.serving.request_body import MAX_INLINE_BYTES, _count_values
from as2ray.serving.settings import ServiceConfig, read_auth_tokens
from as2ray.serving.types import RequestError

RANK = {"question": QUESTION, "candidates": CANDIDATES}


@pytest.mark.parametrize(
    ("limits", "body", "unit"),
    [
        ({"max_candidates": 5}, RANK, "6 items in candidates,"),
        ({"max_text_chars": 15}, RANK, " characters in a text,"),
        ({"max_text_chars": 18}, RANK, " characters in a text,"),
        ({"max_request_tokens": 512}, {**RANK, "candidates": CANDIDATES * 50}, " tokens"),
    ],
)
def test_too_much_of_anything_is_refused_with_the_limit_named(serve, limits, body, unit):
    answer = serve(limits=limits).post("/rank", json=body)
    assert answer.status_code == 413
    message = answer.json()["message"]
    assert str(next(iter(limits.values()))) in message
    assert unit in message


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ({}, 1),
        ({"a": 1, "b": [2, 3, [], {}]}, 1 + 1 + 1 + 3 + 2),
        ({"a, [{": ['"', '\\", [', "\\\\"]}, 1 + 1 + 2),
    ],
)
def test_values_of_a_body_are_counted_outside_of_its_texts(value, count):
    assert _count_values(json.dumps(value).encode()) == count


def test_large_texts_are_no_reason_to_refuse_a_body(client):
    long = {"question": QUESTION, "candidates": ["Muri, [lala]. " * 600] * 40}
    assert len(json.dumps(long)) > MAX_INLINE_BYTES
    assert client.post("/rank", json=long).status_code == 200


def test_a_hundred_thousand_candidates_are_refused_before_they_are_read(client):
    many = {"question": QUESTION, "candidates": ["a"] * 100_000}
    answer = client.post("/rank", json=many)
    assert (answer.status_code, answer.json()["error"]) == (413, "too_large")
    assert " JSON values in the body," in answer.json()["message"]


def chunks(total):
    for _ in range(total // 1_000):
        yield b" " * 1_000


@pytest.mark.parametrize("path", ["/ask", "/rank", "/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_body_over_the_limit_is_refused_whatever_it_tells_of_its_size(serve, index, path):
    client = serve(limits={"max_body_bytes": 4_000}, index_path=index)
    announced, chunked, lying = b" " * 5_000, chunks(5_000), {"content-length": "10"}
    for body, size in ((announced, {}), (chunked, {}), (announced, lying), (chunks(5_000), lying)):
        headers = {"content-type": "application/json", **size}
        answer = client.post(path, content=body, headers=headers)
        assert answer.status_code == 413
        assert "4,000 bytes" in "".join(str(value) for value in answer.json().values())
    headers = {"content-type": "application/json", "content-length": "5000"}
    assert client.post(path, content=b"{}", headers=headers).status_code == 413
    headers = {"content-type": "application/json"}
    for body in (b" " * 4_000, chunks(4_000)):  # not over the limit; no JSON
        assert client.post(path, content=body, headers=headers).status_code in (400, 422)


@pytest.mark.parametrize("text", ["", "   ", "\u2003\n", "\ud800"])
@pytest.mark.parametrize("where", ["question", "candidates"])
def test_empty_text_and_half_characters_are_refused(client, text, where):
    asked = {**RANK, where: text if where == "question" else ["fine", text]}
    answer = client.post(
        "/rank", content=json.dumps(asked), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "text",
    [
        "\x00",
        "🦜🏽‍💻",
        "ﷺ" * 50,
        "e\u0301",
        "\u202eright to left",
        "漢字",
        "\ufeffmark",
        "a\u200bb",
    ],
)
def test_unicode_of_every_kind_is_ranked_and_comes_back_unchanged(client, text):
    answer = client.post("/rank", json={"question": text, "candidates": [text, "other"]})
    assert answer.status_code == 200
    assert {one["text"] for one in answer.json()["ranking"]} == {text, "other"}


@pytest.mark.parametrize(
    "body",
    [
        {**RANK, "unknown": 1},
        {**RANK, "candidates": "one text"},
        {**RANK, "candidates": [1, 2]},
        {**RANK, "question": None},
        {**RANK, "top_k": 0},
        {**RANK, "top_k": "3"},
        *({**RANK, "budget_ms": budget} for budget in (0, -1, 1e308, "50", True, [50])),
    ],
)
def test_wrong_types_and_unknown_keys_are_refused(client, body):
    answer = client.post("/rank", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"] == "invalid_request"


@pytest.mark.parametrize("budget_ms", ["nan", "inf", "-1", "0", "1e308", "50ms", "1,2", ""])
def test_header_with_a_budget_out_of_bounds_is_refused(client, budget_ms):
    answer = client.post("/rank", json=RANK, headers={"x-budget-ms": budget_ms})
    assert (answer.status_code, answer.json()["error"]) == (422, "invalid_request")
    assert "x-budget-ms" in answer.json()["message"]


def test_half_a_character_in_a_field_that_goes_back_unread_is_refused(client):
    documents = [{"text": "fine", "title": "\ud800"}]
    asked = {"query": QUESTION, "documents": documents, "return_documents": True}
    answer = client.post(
        "/v1/rerank", content=json.dumps(asked), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422


def test_a_refusal_does_not_send_back_what_came(client):
    answer = client.post("/rank", json={**RANK, "x" * 100_000: 1})
    assert answer.status_code == 422
    assert len(answer.text) < 1_000


def test_deeply_nested_json_is_refused(client):
    body = b"[" * 100_000 + b"]" * 100_000
    answer = client.post("/rank", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic good", "good", "Bearer \xff"]
)
@pytest.mark.parametrize("path", ["/rank", "/info", "/metrics", "/openapi.json", "/nowhere"])
def test_without_the_token_nothing_opens(serve, header, path):
    client = serve(tokens=("good", "better"))
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = client.request("POST" if path == "/rank" else "GET", path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def test_every_route_and_method_but_those_of_probes_and_page_wants_a_token(serve, index):
    client = serve(tokens=("good",), index_path=index)
    paths = {route.path for route in client.app.routes}
    assert {"/", "/ask", "/rank", "/info", "/openapi.json"} <= paths
    for path, method in product((*paths, "/nowhere"), METHODS):
        for header, is_right in ((None, False), ("Bearer wrong", False), ("Bearer good", True)):
            headers = {} if header is None else {"authorization": header}
            answer = client.request(method, path, headers=headers)
            case = (path, method, header, answer.status_code)
            if is_right or path in ("/", "/health", "/ready"):
                assert answer.status_code != 401, case
            elif method == "OPTIONS":  # a browser's question before a request has no token
                assert answer.status_code in (404, 405), case
            else:
                assert answer.status_code == 401, case


def test_any_of_the_tokens_opens_and_health_and_page_need_none(serve):
    client = serve(tokens=("good", "better"))
    for token in ("good", "better"):
        headers = {"authorization": f"Bearer {token}"}
        assert client.post("/rank", json=RANK, headers=headers).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/").status_code == 200


def test_a_token_of_any_letters_opens(serve):
    client = serve(tokens=("voil\u00e0",))  # whose last byte is a blank of Latin-1's
    headers = {"authorization": "Bearer voil\u00e0".encode()}
    assert client.post("/rank", json=RANK, headers=headers).status_code == 200


def test_tokens_are_read_from_a_file_that_must_hold_some(tmp_path):
    (tmp_path / "tokens").write_text("one\n\n two \n", encoding="utf-8-sig")
    (tmp_path / "tokens").chmod(0o600)
    assert read_auth_tokens(str(tmp_path / "tokens")) == ("one", "two")
    assert read_auth_tokens(None) == ()
    for mode, problem in ((0o644, "chmod 600"), (0o620, "chmod 600")):
        (tmp_path / "tokens").chmod(mode)
        with pytest.raises(ConfigError, match=problem):
            read_auth_tokens(str(tmp_path / "tokens"))
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("empty", "bytes"):
        (tmp_path / name).chmod(0o600)
    for name in ("empty", "missing", "bytes"):
        with pytest.raises(ConfigError, match="one token per line"):
            read_auth_tokens(str(tmp_path / name))


def test_a_fault_of_ours_tells_neither_path_nor_trace(serve, monkeypatch):
    client = serve()

    async def fails(request):
        raise OSError("/a/path/of/ours")

    monkeypatch.setattr(client.service, "rank", fails)
    for path, body, code in (
        ("/rank", RANK, 500),
        ("/rerank", {"query": QUESTION, "texts": CANDIDATES}, 424),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == code
        assert "path" not in answer.text.replace("path of", "")
        assert "Traceback" not in answer.text


@pytest.mark.parametrize("status", [429, 503])
def test_who_finds_no_room_gets_the_status_and_when_to_come_again(
    serve, together, monkeypatch, status
):
    client = serve(
        overload_status_code=status,
        limits={"max_request_tokens": 512},
        batching={"max_batch_tokens": 512, "max_queued_tokens": 512},
    )
    asked = {"query": QUESTION, "texts": CANDIDATES * 3}
    answers = together(lambda: client.post("/rerank", json=asked), 12)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in answers} == {200, status}
    for answer in refused:
        assert answer.json()["error_type"] == "Overloaded"
        assert int(answer.headers["retry-after"]) >= 1


def test_after_a_refusal_for_want_of_room_as_large_requests_are_refused_unread(serve, monkeypatch):
    client, asked = serve(), []

    async def full(request):
        asked.append(request)
        raise RequestError("overloaded", "too many", fix="wait", retry_after=3)

    monkeypatch.setattr(client.service, "rank", full)
    monkeypatch.setattr(middleware, "OVERLOAD_BACKOFF_S", 600.0)
    for path in ("/rank", "/v2/rerank"):
        same = RANK if path == "/rank" else {"query": QUESTION, "documents": CANDIDATES}
        same = same | {"model": "m"}
        less = same | {"candidates" if path == "/rank" else "documents": CANDIDATES[:1]}
        first, again = client.post(path, json=same), client.post(path, json=same)
        assert (first.status_code, len(asked)) == (429, 1)
        assert again.status_code == 429
        assert again.headers["retry-after"] == "3"
        assert again.json() == first.json()
        client.post(path, json=less)  # might find room
        assert len(asked) == 2
        asked.clear()
    assert client.service.records[-1].error.code == "overloaded"
    monkeypatch.setattr(middleware, "OVERLOAD_BACKOFF_S", 0.0)
    later = serve()
    monkeypatch.setattr(later.service, "rank", full)
    for _ in range(2):
        later.post("/rank", json=RANK)
    assert len(asked) == 2


def test_refusal_of_one_client_s_request_refuses_no_other_client_s_unread(serve, monkeypatch):
    client, clients = serve(tokens=("a", "b")), []

    async def full(request):
        clients.append(request.client)
        raise RequestError("overloaded", "too many", retry_after=1)

    monkeypatch.setattr(client.service, "rank", full)
    monkeypatch.setattr(middleware, "OVERLOAD_BACKOFF_S", 600.0)
    for token in ("a", "a", "b", "b"):
        headers = {"authorization": f"Bearer {token}"}
        assert client.post("/rank", json=RANK, headers=headers).status_code == 429
    assert clients == ["token 0", "token 1"]


def test_before_requests_are_refused_the_drop_ratio_rises_and_the_response_says_so(serve, together):
    client = serve(
        limits={"max_request_tokens": 2_048},
        batching={"max_batch_tokens": 512, "max_queued_tokens": 4_096},
        load_shedding={"start_at_fill": 0.0, "max_drop_ratio": 0.9},
    )
    asked = {"model": "m", "query": QUESTION, "documents": CANDIDATES * 8}
    answers = together(lambda: client.post("/v2/rerank", json=asked), 10)
    shed = [answer for answer in answers if answer.headers.get("x-load-shed") == "true"]
    assert shed
    for answer in shed:
        assert "drop ratios raised" in answer.json()["meta"]["warnings"][0]
        assert 0.5 < float(answer.headers["x-drop-ratios"].split(",")[0]) <= 0.9


def test_other_origins_are_let_in_by_option_alone(serve):
    origin = {"origin": "https://example.org"}
    asked = {**origin, "access-control-request-method": "POST"}
    assert (
        "access-control-allow-origin"
        not in serve().post("/rank", json=RANK, headers=origin).headers
    )
    client = serve(cors_origins=["https://example.org"], tokens=("good",))
    answer = client.options("/rank", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    ranked = client.post("/rank", json=RANK, headers={**origin, "authorization": "Bearer good"})
    assert ranked.headers["access-control-expose-headers"] == "*"
    other = client.options("/rank", headers={**asked, "origin": "https://example.com"})
    assert "access-control-allow-origin" not in other.headers


def test_the_log_holds_numbers_and_texts_by_option_alone(serve, caplog):
    for log_request_texts in (False, True):
        caplog.clear()
        with caplog.at_level("INFO", logger="ray.serve.as2ray"):
            serve(log_request_texts=log_request_texts).post("/rank", json=RANK)
        line = json.loads(caplog.messages[-1])
        assert (line["path"], line["status"], line["num_candidates"]) == ("/rank", 200, 6)
        assert line["num_scored"] == [6, 3, 2]
        assert (line["model"], line["load_shed"]) == ("cascade", False)
        assert min(line["duration_ms"], line["num_tokens"], len(line["request_id"])) > 0
        assert ("kovarin" in caplog.text) is log_request_texts


def test_what_is_seen_of_requests_holds_answers_and_refusals(serve):
    client = serve()
    client.post("/rank", json=RANK)
    client.post("/rank", json={})
    client.get("/nowhere")
    good, bad, lost = client.service.records
    assert (good.status_code, good.result.model, good.error) == (200, "cascade", None)
    assert (bad.status_code, bad.error.code) == (422, "invalid_request")
    assert (lost.status_code, lost.error.code) == (404, "not_found")


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": {}},
        {"models": {"a name": "x"}},
        {"models": {"a": "x"}, "unknown": 1},
        {"models": {"a": "x"}, "limits": {"max_request_tokens": 1_000_000}},
        {"models": {"a": "x"}, "replicas": {"min_replicas": 3, "max_replicas": 2}},
        {"models": {"a": "x"}, "overload_status_code": 500},
        {"models": {"a": "x"}, "batching": {"max_queued_requests": 0}},  # Serve takes none either
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="ServiceConfig"):
        ServiceConfig.model_validate(wrong)
