"""Statuses, bodies and headers of errors in each dialect, without an application."""

import json
from typing import get_args

import pytest
from starlette.datastructures import MutableHeaders

from as2ray.serving.error_responses import ERRORS, error_response, status_code
from as2ray.serving.proxy import _to_request_error
from as2ray.serving.types import (
    ErrorCode,
    RequestError,
    RerankRequest,
    check_request_texts,
    check_size,
    timeout_error,
)

ERROR = RequestError("overloaded", "full", "retry in 3 s", 3)


def scope_of(path: str, **state: str) -> dict[str, object]:
    return {"type": "http", "path": path, "state": state}


@pytest.mark.parametrize(
    ("scope", "body"),
    [
        (scope_of("/v2/rerank"), {"message": "full; retry in 3 s"}),
        (scope_of("/v1/rerank"), {"message": "full; retry in 3 s", "detail": "full; retry in 3 s"}),
        (scope_of("/rerank"), {"error": "full; retry in 3 s", "error_type": "Overloaded"}),
        (
            scope_of("/rerank", dialect="v1"),
            {"message": "full; retry in 3 s", "detail": "full; retry in 3 s"},
        ),
        (scope_of("/rank"), {"error": "overloaded", "message": "full", "fix": "retry in 3 s"}),
        (
            scope_of("/no/such/path"),
            {"error": "overloaded", "message": "full", "fix": "retry in 3 s"},
        ),
    ],
)
def test_error_is_told_as_the_dialect_of_the_path_does(scope, body):
    response = error_response(scope, ERROR, 503)
    assert (response.status_code, json.loads(response.body)) == (503, body)
    assert response.headers["retry-after"] == "3"
    assert "www-authenticate" not in response.headers
    assert scope["state"]["error"] is ERROR  # for the log


def test_error_of_a_request_without_state_is_noted_too():
    scope = {"type": "http", "path": "/rank"}
    response = error_response(scope, RequestError("unauthorized", "no token"))
    assert response.headers["www-authenticate"] == "Bearer"
    assert "retry-after" not in response.headers
    assert scope["state"]["error"].code == "unauthorized"
    assert error_response(scope, ERROR).status_code == 429


def test_every_code_has_a_status_and_a_failed_backend_one_of_its_own_in_tei():
    assert ERRORS.keys() == set(get_args(ErrorCode))
    for code, (status, _) in ERRORS.items():
        if code not in ("overloaded", "internal_error"):
            statuses = {status_code(code, dialect, 503) for dialect in ("tei", "as2ray")}
            assert statuses == {status}
    assert status_code("internal_error", "tei", 503) == 424
    assert status_code("internal_error", "v1", 503) == 500
    assert [status_code("overloaded", "tei", status) for status in (429, 503)] == [429, 503]


@pytest.mark.parametrize(
    ("status", "retry_after", "code", "seconds"),
    [
        (408, "", "timeout", 1),
        (429, "7", "overloaded", 7),
        (429, "soon", "overloaded", 1),
        (429, None, "overloaded", 1),
        (404, None, "not_found", None),
        (503, None, "unavailable", 5),
        (500, "7", "internal_error", None),
    ],
)
def test_status_of_serve_is_the_error_of_its_kind(status, retry_after, code, seconds):
    headers = MutableHeaders({} if retry_after is None else {"retry-after": retry_after})
    error = _to_request_error(status, headers)
    assert (error.code, error.retry_after) == (code, seconds)


@pytest.mark.parametrize(("waited_s", "seconds"), [(None, 1), (0.2, 1), (2.6, 3), (30.4, 30)])
def test_request_that_timed_out_may_come_again_after_as_long(waited_s, seconds):
    error = timeout_error(waited_s)
    assert (error.code, error.retry_after) == ("timeout", seconds)


def test_size_may_be_the_limit():
    check_size(1_000, 1_000, "tokens", "send less")
    with pytest.raises(RequestError, match="1,001 tokens, the limit is 1,000") as refused:
        check_size(1_001, 1_000, "tokens", "send less")
    assert (refused.value.code, refused.value.fix) == ("too_large", "send less")


@pytest.mark.parametrize(
    ("question", "candidates", "name"),
    [
        ("  ", ["a"], "the question"),
        ("q", ["a", ""], "candidate 1"),
        ("q", ["\ud800"], "candidate 0"),
    ],
)
def test_text_that_no_tokenizer_reads_is_named(question, candidates, name):
    check_request_texts(RerankRequest("q", ["a"], "m"))
    with pytest.raises(RequestError, match=f"^{name} is blank") as refused:
        check_request_texts(RerankRequest(question, candidates, "m"))
    assert refused.value.code == "invalid_request"
