"""Ids of requests, as clients name them or new."""

import re
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import Scope

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def get_request_id(scope: Scope) -> str:
    """Returns the request's `x-request-id`; a new id if it has none, or one that is not safe.

    Safe ids have at most 128 letters, digits, dots, colons, hyphens and underscores.
    """
    request_id = Headers(scope=scope).get("x-request-id", "")
    return request_id if SAFE_REQUEST_ID.fullmatch(request_id) else uuid4().hex
