"""Status codes and bodies of error responses in each dialect.

`/v1/rerank` answers Cohere's v1 and Jina's clients, so its error body is the union of theirs.
"""

from typing import Literal

from starlette.responses import JSONResponse
from starlette.types import Scope

from as2ray.serving.protocol import StrictModel
from as2ray.serving.types import ErrorCode, RequestError

Dialect = Literal["cohere", "v1", "tei", "as2ray"]
TeiErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


DIALECTS: dict[str, Dialect] = {"/v2/rerank": "cohere", "/v1/rerank": "v1", "/rerank": "tei"}
"""Dialect of each path; all others speak as2ray's own."""


class CohereError(StrictModel):
    """How Cohere says no."""

    message: str


class V1Error(StrictModel):
    """How Cohere (message) and Jina (detail) say no."""

    message: str
    detail: str


class TeiError(StrictModel):
    """How Text Embeddings Inference says no."""

    error: str
    error_type: TeiErrorType


class RankError(StrictModel):
    """Error body of `/rank`, `/ask`, `/documents/ID`, `/info`, `/health` and `/metrics`."""

    error: ErrorCode
    message: str
    fix: str | None


ERRORS: dict[ErrorCode, tuple[int, TeiErrorType]] = {
    "invalid_json": (400, "Tokenizer"),
    "no_candidates": (400, "Empty"),
    "unauthorized": (401, "Validation"),
    "host_not_allowed": (421, "Validation"),
    "body_timeout": (408, "Validation"),
    "model_not_found": (404, "Validation"),
    "not_found": (404, "Validation"),
    "too_large": (413, "Validation"),
    "invalid_request": (422, "Tokenizer"),
    "overloaded": (429, "Overloaded"),
    "timeout": (503, "Overloaded"),
    "unavailable": (503, "Unhealthy"),
    "internal_error": (500, "Backend"),
}
"""HTTP status and Text Embeddings Inference's `error_type` of each code; the setting
`overload_status_code` replaces the status of `overloaded`."""


def error_body(error: RequestError, dialect: Dialect) -> StrictModel:
    """Returns the body of an error response."""
    if dialect == "cohere":
        return CohereError(message=error.message)
    if dialect == "v1":
        return V1Error(message=error.message, detail=error.message)
    if dialect == "tei":
        return TeiError(error=error.message, error_type=ERRORS[error.code][1])
    return RankError(error=error.code, message=error.problem, fix=error.fix)


def status_code(code: ErrorCode, dialect: Dialect, overload_status_code: int) -> int:
    """Returns the HTTP status of an error code.

    Text Embeddings Inference has a status of its own, 424, for a backend that fails.
    """
    if code == "overloaded":
        return overload_status_code
    return 424 if (code, dialect) == ("internal_error", "tei") else ERRORS[code][0]


def get_request_path(scope: Scope) -> str:
    """Returns the path relative to where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def error_response(
    scope: Scope, error: RequestError, overload_status_code: int = 429
) -> JSONResponse:
    """Returns an error response in the dialect of the path, and notes the error for the log."""
    state = scope.setdefault("state", {})
    state["error"] = error
    # `/rerank` speaks two dialects; the application sets which one once it has parsed the body.
    dialect = state.get("dialect", DIALECTS.get(get_request_path(scope), "as2ray"))
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.code == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    status = status_code(error.code, dialect, overload_status_code)
    return JSONResponse(error_body(error, dialect).model_dump(), status, headers)
