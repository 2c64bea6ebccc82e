"""ASGI middleware of Ray Serve's HTTP proxy: request ids, Serve's own headers and errors.

Serve calls it through `http_options.middlewares`, or on a cluster through the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=as2ray.serving.proxy:create_middlewares.
"""

import asyncio
import logging
import time
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from as2ray.serving.admission import MIN_BYTES_PER_SECOND
from as2ray.serving.error_responses import error_response
from as2ray.serving.request_id import get_request_id
from as2ray.serving.types import (
    RequestError,
    internal_error,
    overloaded_error,
    timeout_error,
    unavailable_error,
)

logger = logging.getLogger("ray.serve.as2ray")

SERVE_HEADERS: Final = (
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    *("serve_multiplexed_model_id", "serve-multiplexed-model-id"),
)
"""Headers by which any client could change how Serve treats its request."""

PIECE_BYTES = 64 * 1024
"""Larger responses are sent in pieces of this size, each when the client has read most before it:
the server would otherwise hold a copy of the response of every client that does not read."""

READ_TIMEOUT_S, MAX_UNREAD_BYTES = 15.0, 128_000_000
"""A client must read within the timeout, and after it at `MIN_BYTES_PER_SECOND`. Large responses
are refused while as many bytes of others are unread."""


def create_middlewares() -> list[Middleware]:
    """Returns the middlewares of Serve's HTTP proxy."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """Replaces unsafe headers of requests, and Serve's errors in plain text.

    Args:
        app: Serve's proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.num_unread_bytes = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Serve's own paths
            await self.app(scope, receive, send)
            return
        request_id = get_request_id(scope)
        headers = MutableHeaders(scope=scope)
        headers["x-request-id"] = request_id
        for name in SERVE_HEADERS:
            del headers[name]
        start: Message | None = None
        has_started, is_read, error = False, True, None

        async def send_as_json(message: Message) -> None:
            nonlocal start, has_started, is_read, error
            if message["type"] == "http.response.start" and not has_started:
                response_headers = MutableHeaders(scope=message)
                is_text = response_headers.get("content-type", "").startswith("text/plain")
                # Serve answers none with 400: it is a page of another origin that may not ask.
                if message["status"] > 400 and is_text:
                    error = _to_request_error(message["status"], response_headers)
                start = message
                return
            if start is not None and error is None and not has_started:
                num_bytes = len(message.get("body", b""))
                if num_bytes > PIECE_BYTES and self.num_unread_bytes > MAX_UNREAD_BYTES:
                    error = overloaded_error("too many responses are unread", 1)
                    return
                has_started = True
                await send(start)
            if error is None and is_read:
                is_read = await self._send_in_pieces(message, send)

        try:
            await self.app(scope, receive, send_as_json)
        except Exception:
            if has_started:
                raise
            logger.exception("the proxy failed on a request")
        if not has_started:
            response = error_response(scope, error or internal_error())
            response.headers["x-request-id"] = request_id
            await response(scope, receive, send)

    async def _send_in_pieces(self, message: Message, send: Send) -> bool:
        """Sends a message of a response; returns whether the client has read in time.

        After a response that is not complete, the server closes the connection.
        """
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await send(message)
            return True
        started_at, self.num_unread_bytes = time.monotonic(), self.num_unread_bytes + len(body)
        try:
            for offset in range(0, len(body), PIECE_BYTES):
                piece = body[offset : offset + PIECE_BYTES]
                ends_at = started_at + READ_TIMEOUT_S + offset / MIN_BYTES_PER_SECOND
                async with asyncio.timeout(ends_at - time.monotonic()):
                    await send({**message, "body": piece, "more_body": True})
            await send({**message, "body": b"", "more_body": message.get("more_body", False)})
        except TimeoutError:
            return False
        finally:
            self.num_unread_bytes -= len(body)
        return True


def _to_request_error(status: int, headers: MutableHeaders) -> RequestError:
    """Returns the error for which Serve has a status."""
    retry_after = headers.get("retry-after", "")
    if status == 408:  # Serve's `request_timeout_s`, which is longer than the service's
        return timeout_error(None)
    if status == 429:
        seconds = int(retry_after) if retry_after.isdecimal() else 1
        return overloaded_error("too many requests are queued for a gateway", seconds)
    if status == 404:
        return RequestError("not_found", "no application is served at this path")
    if status == 503:
        return unavailable_error("no gateway responds", "it is starting or being replaced")
    return internal_error()
