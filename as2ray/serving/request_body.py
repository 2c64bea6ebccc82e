"""Parses and validates the bodies of requests, in bounded time and memory."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from as2ray.serving.protocol import V1Request
from as2ray.serving.settings import Limits
from as2ray.serving.types import RequestError, check_size

MAX_INLINE_BYTES = 256 * 1024
"""Size of a body from which it is parsed in a thread, so that small requests do not wait for it."""

VALUES_PER_CANDIDATE = 64
"""A body over `MAX_INLINE_BYTES` may have so many JSON values per candidate of the limit."""

MAX_KEYS = 64
"""Maximum number of keys of a request."""

FIX = "send a request as described in /openapi.json"


def decode_body(body: bytes, limits: Limits) -> dict[str, Any]:
    """Decodes a JSON object after its values have been counted.

    Raises:
        RequestError: The body is no JSON object, or has too many values.
    """
    fix = "send the best of an earlier stage, such as keyword search"
    if len(body) > MAX_INLINE_BYTES:
        max_values = VALUES_PER_CANDIDATE * limits.max_candidates + 1_024
        check_size(_count_values(body), max_values, "JSON values in the body", fix)
    try:
        data = from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        if "hex escape" in str(error):  # JSON's grammar permits half of a surrogate pair
            raise RequestError("invalid_request", f"body: {error}", "send valid Unicode") from None
        raise RequestError("invalid_json", f"the body is not JSON: {error}", FIX) from None
    if not isinstance(data, dict):
        raise RequestError("invalid_request", "body: it must be a JSON object", FIX)
    check_size(len(data), MAX_KEYS, "keys in the body", FIX)
    for key, value in data.items():
        if isinstance(value, list):
            check_size(len(value), limits.max_candidates, f"items in {key[:40]}", fix)
    return data


def validate_body(data: dict[str, Any], body_type: type[BaseModel]) -> BaseModel:
    """Converts a decoded body to a request; stops at the first wrong item of a list.

    Raises:
        RequestError: The body is not such a request.
    """
    try:
        return body_type.model_validate(data)
    except ValidationError as error:
        # The response names place and reason but no value: values are the user's.
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        # Of several types, the one that fits furthest is meant.
        problem = max(problems, key=lambda problem: len(problem["loc"]))
        # A field of two types, such as `drop_ratios`, has pydantic's names of them in its path.
        places = [str(part) for part in problem["loc"] if "constrained-" not in str(part)]
        path = ".".join(["body", *places])[:200]
        raise RequestError("invalid_request", f"{path}: {problem['msg']}", FIX) from None


def _count_values(body: bytes) -> int:
    """Counts the commas and opening brackets outside strings; numpy releases the GIL meanwhile."""
    # In valid JSON, backslashes are in strings alone. Escaped pairs hide no quotation mark then.
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(body, np.uint8)
    is_in_string = np.bitwise_xor.accumulate(characters == ord('"'))
    is_structure = characters == ord(",")
    for bracket in b"[{":
        is_structure |= characters == bracket
    return int(np.count_nonzero(is_structure & ~is_in_string))


def create_body_route(limits: Limits) -> type[APIRoute]:
    """Creates the class of routes that parse their bodies with `parse_body`."""

    class BodyRoute(APIRoute):
        """A route whose body is valid before FastAPI sees it."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """Returns the handler of requests."""
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            annotation: Any = self.body_field.field_info.annotation
            [body_type, *others] = getattr(annotation, "__args__", (annotation,))

            async def parse_and_handle(request: Request) -> Response:
                content_type = request.headers.get("content-type", "").partition(";")[0].strip()
                if not content_type.lower().endswith("json"):
                    fix = "send JSON with the header `content-type: application/json`"
                    raise RequestError("invalid_request", "the body is not sent as JSON", fix)
                if request.headers.get("content-encoding", "identity").lower() != "identity":
                    fix = "send it without the header `content-encoding`"
                    raise RequestError("invalid_request", "the body is compressed", fix)
                body = await request.body()
                is_large = len(body) > MAX_INLINE_BYTES
                decoding = asyncio.to_thread(decode_body, body, limits) if is_large else None
                data = await decoding if decoding else decode_body(body, limits)
                chosen_type = body_type
                if V1Request in others and "documents" in data and "texts" not in data:
                    chosen_type, request.state.dialect = V1Request, "v1"
                parsed = validate_body(data, chosen_type)
                return await handle(_ParsedRequest(request.scope, parsed))

            return parse_and_handle

    return BodyRoute


class _ParsedRequest(Request):
    """A request whose body has been read and parsed."""

    def __init__(self, scope: Any, parsed: BaseModel) -> None:
        super().__init__(scope)
        self.parsed = parsed

    async def body(self) -> bytes:
        return b"parsed"

    async def json(self) -> BaseModel:
        return self.parsed
