"""ASGI middleware around every request: authentication, size limit, timing headers and the log."""

import hmac
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from as2ray.serving.error_responses import Dialect, error_body, status_code
from as2ray.serving.settings import Settings
from as2ray.serving.types import (
    RankingService,
    RequestError,
    RequestRecord,
    RerankResult,
    internal_error,
)

logger = logging.getLogger("ray.serve.as2ray")  # Ray Serve's own log files take its records

DIALECTS: dict[str, Dialect] = {"/v2/rerank": "cohere", "/v1/rerank": "v1", "/rerank": "tei"}
"""Dialect of each path; all others speak as2ray's own."""

PUBLIC_PATHS = ("/", "/health")
"""Paths that need no token: they reveal nothing."""

OVERLOAD_BACKOFF_S = 0.25
"""For this long after a rejection for overload, requests to the same path that are at least as
large are rejected without being parsed: parsing takes CPU time from the ranker, and the queue
shrinks by whole batches."""

CLIENT_DISCONNECTED = 499
"""Status in log and metrics of a request whose client disconnected before the response."""


class RequestMiddleware:
    """Checks, times and records every request; turns exceptions into error responses.

    Args:
        app: The application behind the middleware.
        service: Service that records each request.
        settings: Settings of the service.
        auth_tokens: Accepted bearer tokens; if empty, requests need none.
    """

    def __init__(
        self, app: ASGIApp, service: RankingService, settings: Settings, auth_tokens: Sequence[str]
    ) -> None:
        self.app, self.service, self.settings = app, service, settings
        self.auth_tokens = [token.encode() for token in auth_tokens]
        self.recent_overloads: dict[str, tuple[float, int, RequestError]] = {}
        """For each path: the end of the backoff, the size in bytes from which requests are
        rejected, and the error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at, path = time.perf_counter(), get_request_path(scope)
        state = scope.setdefault("state", {})
        status = CLIENT_DISCONNECTED

        async def send_with_timings(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if "rerank_result" in state:
                    headers = MutableHeaders(scope=message)
                    _add_timing_headers(headers, state["rerank_result"], started_at)
            await send(message)

        try:
            self._check_request(scope)
            await self.app(scope, receive, send_with_timings)
        except Exception as exception:
            if status != CLIENT_DISCONNECTED:  # the response has started
                raise
            error = exception if isinstance(exception, RequestError) else internal_error()
            if error is not exception:
                logger.exception("a request to %s failed", path)
            await error_response(scope, error, self.settings)(scope, receive, send_with_timings)
        finally:
            duration_s = time.perf_counter() - started_at
            request, result, error = map(state.get, ("rerank_request", "rerank_result", "error"))
            size = _content_length(scope)
            if size and request and error and error.code == "overloaded":
                self.recent_overloads[path] = time.monotonic() + OVERLOAD_BACKOFF_S, size, error
            self._record_request(RequestRecord(path, status, duration_s, request, result, error))

    def _check_request(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), get_request_path(scope)
        if self.auth_tokens and path not in PUBLIC_PATHS and scope["method"] != "OPTIONS":
            scheme, _, value = headers.get("authorization", "").partition(" ")
            # bytes.strip() removes ASCII blanks alone; a token may end in other bytes.
            token = value.encode("latin-1", "replace").strip()
            # The token is compared with every known one, each time in constant time.
            matches = [hmac.compare_digest(token, known) for known in self.auth_tokens]
            if scheme.lower() != "bearer" or not any(matches):
                problem = "the header `Authorization: Bearer TOKEN` with a valid token is missing"
                raise RequestError("unauthorized", problem, "ask the operator for a token")
        size = _content_length(scope)
        if size > self.settings.limits.max_body_bytes:
            raise body_too_large_error(self.settings)
        backoff_end, min_size, error = self.recent_overloads.get(path, (0.0, 0, None))
        if error is not None and size >= min_size and time.monotonic() < backoff_end:
            raise error.with_traceback(None)

    def _record_request(self, record: RequestRecord) -> None:
        self.service.record_request(record)
        fields: dict[str, Any] = {"path": record.path, "status": record.status_code}
        fields["duration_ms"] = round(1e3 * record.duration_s, 2)
        if record.error is not None:
            fields["error"] = record.error.code
        if record.request is not None:
            fields["num_candidates"] = len(record.request.candidates)
            if self.settings.log_request_texts:
                fields["question"] = record.request.question
                fields["candidates"] = record.request.candidates
        if record.result is not None:
            for name in ("model", "num_tokens", "num_scored", "load_shed"):
                fields[name] = getattr(record.result, name)
        logger.info(json.dumps(fields, ensure_ascii=False))


def body_too_large_error(settings: Settings) -> RequestError:
    """Returns the error of a request whose body is over the limit."""
    problem = f"the body is over the limit of {settings.limits.max_body_bytes:,} bytes"
    return RequestError("too_large", problem, "send fewer or shorter candidates")


def _content_length(scope: Scope) -> int:
    """Returns the size of the body in bytes by its header; 0 for a chunked body."""
    content_length = Headers(scope=scope).get("content-length", "")
    return int(content_length) if content_length.isdecimal() else 0


def get_request_path(scope: Scope) -> str:
    """Returns the path relative to where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def error_response(scope: Scope, error: RequestError, settings: Settings) -> JSONResponse:
    """Returns an error response in the dialect of the path, and notes the error for the log."""
    state = scope.setdefault("state", {})
    state["error"] = error
    # `/rerank` speaks two dialects; the application sets which one once it has parsed the body.
    dialect = state.get("dialect", DIALECTS.get(get_request_path(scope), "as2ray"))
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.code == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    status = status_code(error.code, dialect, settings.overload_status_code)
    return JSONResponse(error_body(error, dialect).model_dump(), status, headers)


def _add_timing_headers(headers: MutableHeaders, result: RerankResult, started_at: float) -> None:
    """Adds Text Embeddings Inference's headers, in milliseconds, and as2ray's own."""
    seconds = {
        "x-total-time": time.perf_counter() - started_at,
        "x-tokenization-time": result.timings_s["tokenize"],
        "x-queue-time": result.timings_s["queue"],
        "x-inference-time": result.timings_s["inference"],
    }
    for name, value in seconds.items():
        headers[name] = str(round(1e3 * value))
    headers["x-compute-tokens"] = str(result.num_tokens)
    headers["x-model"] = result.model
    if result.exit_layers:
        headers["x-drop-ratios"] = ",".join(f"{ratio:g}" for ratio in result.drop_ratios)
        headers["x-load-shed"] = str(result.load_shed).lower()
