"""ASGI middleware of Ray Serve's HTTP proxy: request ids, Serve's own headers and errors.

Serve calls it through `http_options.middlewares`, or on a cluster through the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=as2ray.serving.proxy:create_middlewares.
"""

import logging
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def create_middlewares() -> list[Middleware]:
    """Returns the middlewares of Serve's HTTP proxy."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """Replaces unsafe headers of requests, and Serve's errors in plain text.

    Args:
        app: Serve's proxy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

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
        has_started, error = False, None

        async def send_as_json(message: Message) -> None:
            nonlocal has_started, error
            if message["type"] == "http.response.start" and not has_started:
                response_headers = MutableHeaders(scope=message)
                is_text = response_headers.get("content-type", "").startswith("text/plain")
                if message["status"] >= 400 and is_text:
                    error = _to_request_error(message["status"], response_headers)
                    return
                has_started = True
            if error is None:
                await send(message)

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
