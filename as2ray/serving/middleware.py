"""ASGI middleware around every request: authentication, limits, timing headers and the log."""

import hmac
import json
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from as2ray.serving.admission import Admission, body_too_large_error
from as2ray.serving.error_responses import error_response, get_request_path
from as2ray.serving.request_id import get_request_id
from as2ray.serving.settings import Settings
from as2ray.serving.types import (
    RankingService,
    RequestError,
    RequestRecord,
    RerankResult,
    internal_error,
)

logger = logging.getLogger("ray.serve.as2ray")  # Ray Serve's own log files take its records

PROBE_PATHS = ("/health", "/ready")
"""Paths of probes, which are answered however busy the service is."""

PUBLIC_PATHS = ("/", *PROBE_PATHS)
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
        admission: Bounds the requests at the same time.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: RankingService,
        settings: Settings,
        auth_tokens: Sequence[str],
        admission: Admission,
    ) -> None:
        self.app, self.service, self.settings, self.admission = app, service, settings, admission
        self.auth_tokens = [token.encode() for token in auth_tokens]
        self.recent_overloads: dict[tuple[str, str | None], tuple[float, int, RequestError]] = {}
        """For each path and client with a token: the end of the backoff, the size in bytes from
        which requests are rejected, and the error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at, path = time.perf_counter(), get_request_path(scope)
        state = scope.setdefault("state", {})
        state["arrived_at"] = time.monotonic()
        status, request_id = CLIENT_DISCONNECTED, get_request_id(scope)
        is_head = scope["method"] == "HEAD" and path in PUBLIC_PATHS
        if is_head:
            scope["method"] = "GET"

        async def send_with_timings(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if "rerank_result" in state:
                    headers = MutableHeaders(scope=message)
                    _add_timing_headers(headers, state["rerank_result"], started_at)
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            self._check_request(scope)
            if path in PROBE_PATHS:
                await self.app(scope, receive, send_with_timings)
            else:
                client = (scope.get("client") or [""])[0]
                with self.admission.admit(receive, client) as receive_body:
                    if scope["method"] == "POST":
                        self.service.check_rankers()
                    await self.app(scope, receive_body, send_with_timings)
        except ClientDisconnect:
            pass
        except Exception as exception:
            if status != CLIENT_DISCONNECTED:  # the response has started
                raise
            error = exception if isinstance(exception, RequestError) else internal_error()
            if error is not exception:
                logger.exception("a request to %s failed", path)
            response = error_response(scope, error, self.settings.overload_status_code)
            await response(scope, receive, send_with_timings)
        finally:
            duration_s = time.perf_counter() - started_at
            request, result, error = map(state.get, ("rerank_request", "rerank_result", "error"))
            size = _content_length(scope)
            if size and request and error and error.code == "overloaded":
                backoff_end = time.monotonic() + OVERLOAD_BACKOFF_S
                self.recent_overloads[path, state.get("client")] = backoff_end, size, error
            self._record_request(
                RequestRecord(request_id, path, status, duration_s, request, result, error)
            )

    def _check_request(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), get_request_path(scope)
        allowed_hosts = self.settings.allowed_hosts
        if allowed_hosts and path not in PROBE_PATHS:
            # The port may be another one behind a proxy.
            host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
            if host not in allowed_hosts:
                problem = "the header `Host` names another service"
                raise RequestError("host_not_allowed", problem, "the operator sets `allowed_hosts`")
        if self.auth_tokens and path not in PUBLIC_PATHS and scope["method"] != "OPTIONS":
            scheme, _, value = headers.get("authorization", "").partition(" ")
            # bytes.strip() removes ASCII blanks alone; a token may end in other bytes.
            token = value.encode("latin-1", "replace").strip()
            # The token is compared with every known one, each time in constant time.
            matches = [hmac.compare_digest(token, known) for known in self.auth_tokens]
            if scheme.lower() != "bearer" or not any(matches):
                problem = "the header `Authorization: Bearer TOKEN` with a valid token is missing"
                raise RequestError("unauthorized", problem, "ask the operator for a token")
            scope["state"]["client"] = f"token {matches.index(True)}"
        size = _content_length(scope)
        if size > self.settings.limits.max_body_bytes:
            raise body_too_large_error(self.settings.limits.max_body_bytes)
        key = path, scope["state"].get("client")
        backoff_end, min_size, error = self.recent_overloads.get(key, (0.0, 0, None))
        if error is not None and size >= min_size and time.monotonic() < backoff_end:
            raise error.with_traceback(None)

    def _record_request(self, record: RequestRecord) -> None:
        self.service.record_request(record)
        fields: dict[str, Any] = {"request_id": record.request_id, "path": record.path[:200]}
        fields["status"] = record.status_code
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
        # Serve sends its records to the console, too, unless they say otherwise.
        logger.info(json.dumps(fields), extra={"log_to_stderr": False})


def _content_length(scope: Scope) -> int:
    """Returns the size of the body in bytes by its header; 0 for a chunked body."""
    content_length = Headers(scope=scope).get("content-length", "")
    return int(content_length) if content_length.isdecimal() else 0


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
    if result.budget_exceeded_ms is not None:
        headers["x-budget-exceeded-ms"] = f"{result.budget_exceeded_ms:g}"
