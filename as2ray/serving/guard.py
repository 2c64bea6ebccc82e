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

from as2ray.serving.asked import Answer, Refused, failed
from as2ray.serving.refusals import Dialect, no, status
from as2ray.serving.service import Seen, Service
from as2ray.serving.settings import Settings

LOGGER = logging.getLogger("ray.serve.as2ray")
"""Serve's own files take what goes here."""

DIALECTS: dict[str, Dialect] = {"/v2/rerank": "cohere", "/v1/rerank": "v1", "/rerank": "tei"}
"""By path; every other speaks ours."""

OPEN = ("/", "/health")
"""Paths that no token is asked for: they tell nothing."""

PAUSE = 0.25
"""Seconds after a refusal for want of room in which another request to the same path, as large or
larger, is refused unread: to read it costs the ranker's machine time, and room is made by whole
batches."""


class Guard:
    """Middleware: token, size of the body, no trace in an error, times in the headers, the log.

    Args:
        app: What it guards.
        service: Whom it tells of each request.
        settings: The operator's.
        tokens: Any of these opens; none asked where there is none.
    """

    def __init__(
        self, app: ASGIApp, service: Service, settings: Settings, tokens: Sequence[str]
    ) -> None:
        self.app, self.service, self.settings = app, service, settings
        self.tokens = [token.encode() for token in tokens]
        self.full: dict[str, tuple[float, int, Refused]] = {}
        """By path until when, from how many bytes on, and why requests are refused unread."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, path = time.perf_counter(), path_of(scope)
        state = scope.setdefault("state", {})
        code = 499  # what is told of a client that went away before it was answered

        async def tell(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                _add_times(MutableHeaders(scope=message), state.get("answer"), began)
            await send(message)

        try:
            await self._guarded(scope, self._counted(scope, receive), tell)
        finally:
            seconds = time.perf_counter() - began
            asked, answer, refused = (state.get(name) for name in ("asked", "answer", "refused"))
            size = _size(scope)
            if size and asked is not None and refused is not None and refused.kind == "overloaded":
                self.full[path] = time.monotonic() + PAUSE, size, refused
            self._over(Seen(path, code, seconds, asked, answer, refused))

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, receive, watched)
        except Exception as error:
            if started:
                raise
            refused = error if isinstance(error, Refused) else failed()
            if not isinstance(error, Refused):
                LOGGER.exception("a request to %s failed", path_of(scope))
            await refusal(scope, refused, self.settings)(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self.tokens and path_of(scope) not in OPEN and scope["method"] != "OPTIONS":
            kind, _, given = headers.get("authorization", "").partition(" ")
            token = given.encode("latin-1", "replace").strip()  # of ASCII's blanks alone
            # Every token is compared, each in constant time.
            fits = [hmac.compare_digest(token, known) for known in self.tokens]
            if kind.lower() != "bearer" or not any(fits):
                raise Refused(
                    "unauthorised",
                    "no valid token",
                    expected="the header `Authorization: Bearer TOKEN`",
                    mend="ask the operator for a token",
                )
        size = _size(scope)
        if size > self.settings.limits.body_bytes:
            raise self._too_large()
        until, least, refused = self.full.get(path_of(scope), (0.0, 0, None))
        if refused is not None and size >= least and time.monotonic() < until:
            raise refused.with_traceback(None)

    def _counted(self, scope: Scope, receive: Receive) -> Receive:
        """What is received, up to the limit: a body in chunks has no length to look at."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.settings.limits.body_bytes:
                # FastAPI makes a malformed body of any other error while it reads.
                scope["state"]["refused"] = self._too_large()
                raise HTTPException(413)
            return message

        return counted

    def _too_large(self) -> Refused:
        return Refused(
            "too_large",
            "a body over the limit",
            expected=f"at most {self.settings.limits.body_bytes:,} bytes",
            mend="send fewer or shorter candidates",
        )

    def _over(self, seen: Seen) -> None:
        self.service.observe(seen)
        told: dict[str, Any] = {
            "path": seen.path,
            "status": seen.status,
            "ms": round(1e3 * seen.seconds, 2),
        }
        if seen.refused is not None:
            told["refused"] = seen.refused.kind
        if seen.asked is not None:
            told["candidates"] = len(seen.asked.candidates)
            if self.settings.log_texts:
                told |= {"question": seen.asked.question, "texts": seen.asked.candidates}
        if seen.answer is not None:
            told |= {
                "model": seen.answer.model,
                "tokens": seen.answer.tokens,
                "survivors": seen.answer.survivors,
                "relieved": seen.answer.relieved,
            }
        LOGGER.info(json.dumps(told, ensure_ascii=False))


def _size(scope: Scope) -> int:
    """Bytes of the body as it tells them; of a body in chunks 0."""
    told = Headers(scope=scope).get("content-length", "")
    return int(told) if told.isdecimal() else 0


def path_of(scope: Scope) -> str:
    """The path below wherever the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def refusal(scope: Scope, refused: Refused, settings: Settings) -> JSONResponse:
    """A no, in the dialect of the path."""
    scope.setdefault("state", {})["refused"] = refused
    # `/rerank` speaks two dialects; which one, its body says, once it is read.
    dialect = scope["state"].get("dialect", DIALECTS.get(path_of(scope), "as2ray"))
    headers = {} if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    if refused.kind == "unauthorised":
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(
        no(refused, dialect).model_dump(),
        status(refused, dialect, settings.refusal),
        headers,
    )


def _add_times(headers: MutableHeaders, answer: Answer | None, began: float) -> None:
    """Text Embeddings Inference's headers, in milliseconds, and ours."""
    if answer is None:
        return
    seconds = {
        "x-total-time": time.perf_counter() - began,
        "x-tokenization-time": answer.seconds["read"],
        "x-queue-time": answer.seconds["queue"],
        "x-inference-time": answer.seconds["rank"],
    }
    for name, value in seconds.items():
        headers[name] = str(round(1e3 * value))
    headers["x-compute-tokens"] = str(answer.tokens)
    headers["x-model"] = answer.model
    if answer.exits:
        headers["x-drop"] = ",".join(f"{ratio:g}" for ratio in answer.drop)
        headers["x-relieved"] = str(answer.relieved).lower()
