"""What surrounds every request: who may ask, how much, and what is told of it afterwards.

Knows ASGI. Must not know what is asked or Ray.
"""

import hmac
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from as2ray.serving.error_responses import Dialect, error_body, status_code
from as2ray.serving.service import RankingService, RequestRecord
from as2ray.serving.settings import Settings
from as2ray.serving.types import RequestError, RerankResult, internal_error

logger = logging.getLogger("ray.serve.as2ray")
"""Serve's own files take what goes here."""

DIALECTS: dict[str, Dialect] = {"/v2/rerank": "cohere", "/v1/rerank": "v1", "/rerank": "tei"}
"""By path; every other speaks ours."""

PUBLIC_PATHS = ("/", "/health")
"""Paths that no token is asked for: they tell nothing."""

OVERLOAD_BACKOFF_S = 0.25
"""Seconds after a refusal for want of room in which another request to the same path, as large or
larger, is refused unread: to read it costs the ranker's machine time, and room is made by whole
batches."""


class RequestMiddleware:
    """Middleware: token, size of the body, no trace in an error, times in the headers, the log.

    Args:
        app: What it guards.
        service: Whom it tells of each request.
        settings: The operator's.
        tokens: Any of these opens; none asked where there is none.
    """

    def __init__(
        self, app: ASGIApp, service: RankingService, settings: Settings, auth_tokens: Sequence[str]
    ) -> None:
        self.app, self.service, self.settings = app, service, settings
        self.auth_tokens = [token.encode() for token in auth_tokens]
        self.recent_overloads: dict[str, tuple[float, int, RequestError]] = {}
        """By path until when, from how many bytes on, and why requests are refused unread."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, path = time.perf_counter(), get_request_path(scope)
        state = scope.setdefault("state", {})
        code = 499  # what is told of a client that went away before it was answered

        async def tell(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                _add_timing_headers(MutableHeaders(scope=message), state.get("answer"), began)
            await send(message)

        try:
            await self._call_app(scope, self._limit_body(scope, receive), tell)
        finally:
            seconds = time.perf_counter() - began
            asked, answer, refused = (state.get(name) for name in ("asked", "answer", "refused"))
            size = _content_length(scope)
            if size and asked is not None and refused is not None and refused.kind == "overloaded":
                self.recent_overloads[path] = time.monotonic() + OVERLOAD_BACKOFF_S, size, refused
            self._record_request(RequestRecord(path, code, seconds, asked, answer, refused))

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check_request(scope)
            await self.app(scope, receive, watched)
        except Exception as error:
            if started:
                raise
            refused = error if isinstance(error, RequestError) else internal_error()
            if not isinstance(error, RequestError):
                logger.exception("a request to %s failed", get_request_path(scope))
            await error_response(scope, refused, self.settings)(scope, receive, send)

    def _check_request(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if (
            self.auth_tokens
            and get_request_path(scope) not in PUBLIC_PATHS
            and scope["method"] != "OPTIONS"
        ):
            kind, _, given = headers.get("authorization", "").partition(" ")
            token = given.encode("latin-1", "replace").strip()  # of ASCII's blanks alone
            # Every token is compared, each in constant time.
            fits = [hmac.compare_digest(token, known) for known in self.auth_tokens]
            if kind.lower() != "bearer" or not any(fits):
                raise RequestError(
                    "unauthorised",
                    "no valid token; expected the header `Authorization: Bearer TOKEN`",
                    fix="ask the operator for a token",
                )
        size = _content_length(scope)
        if size > self.settings.limits.max_body_bytes:
            raise self._body_too_large_error()
        until, least, refused = self.recent_overloads.get(get_request_path(scope), (0.0, 0, None))
        if refused is not None and size >= least and time.monotonic() < until:
            raise refused.with_traceback(None)

    def _limit_body(self, scope: Scope, receive: Receive) -> Receive:
        """What is received, up to the limit: a body in chunks has no length to look at."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.settings.limits.max_body_bytes:
                # FastAPI makes a malformed body of any other error while it reads.
                scope["state"]["refused"] = self._body_too_large_error()
                raise HTTPException(413)
            return message

        return counted

    def _body_too_large_error(self) -> RequestError:
        return RequestError(
            "too_large",
            "a body over the limit"
            f"; expected at most {self.settings.limits.max_body_bytes:,} bytes",
            fix="send fewer or shorter candidates",
        )

    def _record_request(self, record: RequestRecord) -> None:
        self.service.record_request(record)
        told: dict[str, Any] = {
            "path": record.path,
            "status": record.status_code,
            "ms": round(1e3 * record.duration_s, 2),
        }
        if record.error is not None:
            told["refused"] = record.error.code
        if record.request is not None:
            told["candidates"] = len(record.request.candidates)
            if self.settings.log_request_texts:
                told |= {"question": record.request.question, "texts": record.request.candidates}
        if record.result is not None:
            told |= {
                "model": record.result.model,
                "tokens": record.result.num_tokens,
                "survivors": record.result.num_scored,
                "relieved": record.result.load_shed,
            }
        logger.info(json.dumps(told, ensure_ascii=False))


def _content_length(scope: Scope) -> int:
    """Bytes of the body as it tells them; of a body in chunks 0."""
    told = Headers(scope=scope).get("content-length", "")
    return int(told) if told.isdecimal() else 0


def get_request_path(scope: Scope) -> str:
    """The path below wherever the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def error_response(scope: Scope, error: RequestError, settings: Settings) -> JSONResponse:
    """A no, in the dialect of the path."""
    scope.setdefault("state", {})["refused"] = error
    # `/rerank` speaks two dialects; which one, its body says, once it is read.
    dialect = scope["state"].get("dialect", DIALECTS.get(get_request_path(scope), "as2ray"))
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.code == "unauthorised":
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(
        error_body(error, dialect).model_dump(),
        status_code(error, dialect, settings.overload_status_code),
        headers,
    )


def _add_timing_headers(
    headers: MutableHeaders, result: RerankResult | None, started_at: float
) -> None:
    """Text Embeddings Inference's headers, in milliseconds, and ours."""
    if result is None:
        return
    seconds = {
        "x-total-time": time.perf_counter() - started_at,
        "x-tokenization-time": result.timings_s["read"],
        "x-queue-time": result.timings_s["queue"],
        "x-inference-time": result.timings_s["rank"],
    }
    for name, value in seconds.items():
        headers[name] = str(round(1e3 * value))
    headers["x-compute-tokens"] = str(result.num_tokens)
    headers["x-model"] = result.model
    if result.exit_layers:
        headers["x-drop"] = ",".join(f"{ratio:g}" for ratio in result.drop_ratios)
        headers["x-relieved"] = str(result.load_shed).lower()
