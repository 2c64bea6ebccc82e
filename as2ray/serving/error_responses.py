"""How each dialect says no: a form and a status for every reason.

Knows pydantic and the service's reasons. Must not know HTTP servers or rankers.

`/v1/rerank` speaks Cohere's v1 and Jina's dialects at once, so its form is the union of theirs.
"""

from typing import Any, Literal, get_args

from as2ray.serving.protocol import StrictModel
from as2ray.serving.types import ErrorCode, RequestError

Dialect = Literal["cohere", "v1", "tei", "as2ray"]


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
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class RankError(StrictModel):
    """How we say no."""

    error: ErrorCode
    message: str
    expected: str
    fix: str


ERROR_MODELS: dict[Dialect, type[StrictModel]] = {
    "cohere": CohereError,
    "v1": V1Error,
    "tei": TeiError,
    "as2ray": RankError,
}

STATUS_CODES: dict[ErrorCode, int] = {
    "malformed": 400,
    "empty": 400,
    "unauthorised": 401,
    "unknown_model": 404,
    "not_found": 404,
    "too_large": 413,
    "invalid": 422,
    "overloaded": 429,
    "too_late": 503,
    "failed": 500,
}

TEI_ERROR_TYPES: dict[ErrorCode, str] = {
    "empty": "Empty",
    "malformed": "Tokenizer",
    "invalid": "Tokenizer",
    "overloaded": "Overloaded",
    "too_late": "Overloaded",
    "failed": "Backend",
}
"""The rest are its `Validation`."""


def error_body(error: RequestError, dialect: Dialect) -> StrictModel:
    """A refusal in a dialect's form."""
    told = error.message
    if dialect == "cohere":
        return CohereError(message=told)
    if dialect == "v1":
        return V1Error(message=told, detail=told)
    if dialect == "tei":
        kind: Any = TEI_ERROR_TYPES.get(error.code, "Validation")
        return TeiError(error=told, error_type=kind)
    return RankError(
        error=error.code, message=error.problem, expected=error.expected, fix=error.fix
    )


def status_code(error: RequestError, dialect: Dialect, overload_status_code: int = 429) -> int:
    """Its HTTP status; Text Embeddings Inference has one of its own for a failing backend."""
    if error.code == "overloaded":
        return overload_status_code
    return 424 if (error.code, dialect) == ("failed", "tei") else STATUS_CODES[error.code]


def error_status_codes(dialect: Dialect, overload_status_code: int = 429) -> list[int]:
    """All that a ranking of this dialect may answer in place of 200."""
    kinds = (
        RequestError(
            kind,
            "; expected ",
        )
        for kind in get_args(ErrorCode)
    )
    return sorted({status_code(refused, dialect, overload_status_code) for refused in kinds})
