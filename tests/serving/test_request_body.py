"""Bodies that are legal or hostile: what they cost, and what is said of them."""

import gzip
import json
import resource
import time

import pytest
from served import CANDIDATES, QUESTION

from as2ray.serving.error_responses import get_request_path
from as2ray.serving.protocol import CohereRequest, RankRequest, V1Request
from as2ray.serving.request_body import decode_body, validate_body
from as2ray.serving.settings import Limits
from as2ray.serving.types import RequestError

JSON = {"content-type": "application/json"}
MB = 1_000_000


def repeated(item: str, times: int, key: str = "documents") -> bytes:
    return f'{{"model": "m", "query": "q", "{key}": [{",".join([item] * times)}]}}'.encode()


KEYS = "{" + ",".join(f'"k{number}":1' for number in range(60_000)) + "}"
HOSTILE = {
    "integers": (repeated("1", 2_000_000), V1Request),
    "integers of cohere": (repeated("1", 2_000_000), CohereRequest),
    "few integers": (repeated("1", 1_000), V1Request),
    "empty documents": (repeated("{}", 2_600_000), V1Request),
    "nested lists": (repeated("[[[[]]]]", 800_000), V1Request),
    "keys of a document": (repeated(KEYS, 1), V1Request),
    "keys of a request": (KEYS.encode(), RankRequest),
    "rank fields": (
        repeated("{}", 100_000)[:-1] + b',"rank_fields":[' + b'"x",' * 500_000 + b'"x"]}',
        V1Request,
    ),
    "unclosed": (b"[" * 8 * MB, V1Request),
    "quotation marks": (b'{"query":' + b'"",' * 2_600_000, V1Request),
    "escapes": (b'{"query":"' + b'\\"' * 3_900_000 + b'","documents":[1]}', V1Request),
}


def refuse(name: str) -> float:
    """Seconds of the CPU until a hostile body is refused."""
    body, body_type = HOSTILE[name]
    started_at = time.process_time()
    with pytest.raises(RequestError):
        validate_body(decode_body(body, Limits()), body_type)
    return time.process_time() - started_at


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_in_bounded_time_and_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert min(refuse(name) for _ in range(3)) < 0.3
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1_000 < 200


def test_documents_times_fields_do_not_stop_the_service(client):
    fields = [f"field {number}" for number in range(2_000)]
    for documents in (100_000, 900):
        asked = {"query": QUESTION, "documents": [{}] * documents, "rank_fields": fields}
        started_at = time.monotonic()
        answer = client.post("/v1/rerank", json=asked)
        assert answer.status_code in (413, 422)
        assert time.monotonic() - started_at < 5


def test_repeated_rank_fields_count_once(client):
    documents = [{"text": text} for text in CANDIDATES]
    asked = {"query": QUESTION, "documents": documents}
    answers = [
        client.post("/v1/rerank", json=asked | {"rank_fields": fields}).json()
        for fields in (["text"], ["text"] * 60)
    ]
    assert answers[0]["usage"] == answers[1]["usage"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'{"question": "q",\n "candidates": ["a",]}', "line 2 column 21"),
        (b'{"question": NaN}', "line 1 column"),
        (b'{"question": "\xff"}', "line 1 column"),
        (b"", "line 1 column"),
        (b"[1]", "JSON object"),
    ],
)
def test_a_body_that_cannot_be_parsed_is_told_why_and_where(client, content, place):
    answer = client.post("/rank", content=content, headers=JSON)
    assert answer.status_code in (400, 422)
    assert place in answer.json()["message"]


def test_a_body_may_begin_with_a_byte_order_mark(client):
    body = json.dumps({"question": QUESTION, "candidates": CANDIDATES}).encode("utf-8-sig")
    assert client.post("/rank", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize(("ratios", "place"), [([0.5, 2], "drop_ratios.1"), (2, "drop_ratios")])
def test_wrong_item_of_a_field_that_may_be_a_list_is_told_where(client, ratios, place):
    body = {"question": QUESTION, "candidates": CANDIDATES, "drop_ratios": ratios}
    message = client.post("/rank", json=body).json()["message"]
    assert message == f"body.{place}: Input should be less than 1"


def test_a_body_of_another_type_is_told_which_to_send(client):
    answer = client.post("/v2/rerank", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 422
    assert "content-type: application/json" in answer.json()["message"]


def test_a_compressed_body_is_told_to_come_as_it_is(client):
    body = json.dumps({"question": QUESTION, "candidates": CANDIDATES}).encode()
    answer = client.post(
        "/rank", content=gzip.compress(body), headers={**JSON, "content-encoding": "gzip"}
    )
    assert answer.status_code == 422
    assert answer.json()["message"] == "the body is compressed"
    answer = client.post("/rank", content=body, headers={**JSON, "content-encoding": "identity"})
    assert answer.status_code == 200


def test_a_large_legal_body_with_brackets_in_its_texts_is_ranked(client):
    texts = [f'[{number}], {{"{number}\\' + ",[" * 200 for number in range(900)]
    body = json.dumps({"question": QUESTION, "candidates": texts, "drop_ratios": 0.9})
    assert len(body) > 256 * 1024
    assert client.post("/rank", content=body, headers=JSON).status_code == 200


def test_a_request_of_two_dialects_is_answered_in_the_one_of_its_texts(client):
    asked = {"query": QUESTION, "texts": CANDIDATES}
    assert isinstance(client.post("/rerank", json=asked).json(), list)
    wrong = client.post("/rerank", json={"query": 1, "documents": CANDIDATES})
    assert (wrong.status_code, set(wrong.json())) == (422, {"message", "detail"})
    assert client.post("/rerank", json={"query": 1, "texts": []}).json()["error_type"]
    both = {**asked, "documents": CANDIDATES}
    assert isinstance(client.post("/rerank", json=both).json(), list)


@pytest.mark.parametrize(
    ("path", "root_path", "expected"),
    [("/rank", "", "/rank"), ("/a/rank", "/a", "/rank"), ("/a", "/a", "/")],
)
def test_path_is_relative_to_where_the_service_is_mounted(path, root_path, expected):
    assert get_request_path({"path": path, "root_path": root_path}) == expected
