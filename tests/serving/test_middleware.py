"""What the middleware adds to responses and writes into the log, without an application."""

import json
import time

import pytest
from starlette.datastructures import MutableHeaders

from as2ray.serving.admission import Admission
from as2ray.serving.middleware import RequestMiddleware, _add_timing_headers, _content_length
from as2ray.serving.settings import Settings
from as2ray.serving.types import (
    CandidateScore,
    RequestRecord,
    RerankRequest,
    RerankResult,
    overloaded_error,
)

TIMINGS_S = {"tokenize": 0.0012, "queue": 0.0207, "inference": 1.25}


def test_headers_tell_milliseconds_tokens_model_and_what_was_dropped():
    headers = MutableHeaders()
    result = RerankResult(
        *("m", [], 71, (1, 2, 3), (6, 3, 2), (0.25, 0.5), True),
        budget_exceeded_ms=2.5,
        timings_s=TIMINGS_S,
    )
    _add_timing_headers(headers, result, time.perf_counter() - 3)
    named = dict(headers)
    assert 3_000 <= int(named.pop("x-total-time")) < 60_000
    assert named == {
        "x-tokenization-time": "1",
        "x-queue-time": "21",
        "x-inference-time": "1250",
        "x-compute-tokens": "71",
        "x-model": "m",
        "x-drop-ratios": "0.25,0.5",
        "x-load-shed": "true",
        "x-budget-exceeded-ms": "2.5",
    }


def test_headers_of_a_ranker_without_exits_name_no_drop_ratios():
    headers = MutableHeaders()
    _add_timing_headers(headers, RerankResult("m", [], 7, timings_s=TIMINGS_S), 0.0)
    assert not {"x-drop-ratios", "x-load-shed", "x-budget-exceeded-ms"} & set(headers)


@pytest.mark.parametrize(
    ("value", "size"), [("120", 120), ("-1", 0), ("1.5", 0), ("many", 0), ("", 0), (None, 0)]
)
def test_size_of_a_body_is_what_its_header_says(value, size):
    headers = [] if value is None else [(b"content-length", value.encode())]
    assert _content_length({"type": "http", "headers": headers}) == size


class Service:
    """Keeps the records of requests."""

    def __init__(self) -> None:
        self.records = []

    def record_request(self, record: RequestRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("log_request_texts", [False, True])
def test_log_has_a_line_of_json_with_numbers_and_with_texts_if_set(log_request_texts, caplog):
    settings = Settings(log_request_texts=log_request_texts)
    middleware = RequestMiddleware(None, Service(), settings, (), Admission(settings))
    request = RerankRequest("q?", ["a", "b"], "m")
    result = RerankResult("m", [CandidateScore(0, 0.5)], 9, (1,), (2,), load_shed=True)
    records = [
        RequestRecord("id-1", "/" + "x" * 300, 200, 0.0123456, request, result, None),
        RequestRecord("id-2", "/rank", 429, 0.5, None, None, overloaded_error("full", 1)),
    ]
    with caplog.at_level("INFO", logger="ray.serve.as2ray"):
        for record in records:
            middleware._record_request(record)
    assert middleware.service.records == records
    texts = {"question": "q?", "candidates": ["a", "b"]} if log_request_texts else {}
    assert [json.loads(record.message) for record in caplog.records] == [
        {
            **{"request_id": "id-1", "path": "/" + "x" * 199, "status": 200},
            **{"duration_ms": 12.35, "num_candidates": 2, **texts},
            **{"model": "m", "num_tokens": 9, "num_scored": [2], "load_shed": True},
        },
        {
            **{"request_id": "id-2", "path": "/rank", "status": 429},
            **{"duration_ms": 500.0, "error": "overloaded"},
        },
    ]
    assert not any(record.log_to_stderr for record in caplog.records)
