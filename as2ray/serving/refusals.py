"""How each dialect says no: a form and a status for every reason.

Knows pydantic and the service's reasons. Must not know HTTP servers or rankers.

`/v1/rerank` speaks Cohere's v1 and Jina's dialects at once, so its form is the union of theirs.
"""

from typing import Any, Literal, get_args

from as2ray.serving.asked import Kind, Refused
from as2ray.serving.protocol import Wire

Dialect = Literal["cohere", "v1", "tei", "as2ray"]


class CohereError(Wire):
    """How Cohere says no."""

    message: str


class V1Error(Wire):
    """How Cohere (message) and Jina (detail) say no."""

    message: str
    detail: str


class TeiError(Wire):
    """How Text Embeddings Inference says no."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class RankError(Wire):
    """How we say no."""

    error: Kind
    came: str
    expected: str
    mend: str


ERRORS: dict[Dialect, type[Wire]] = {
    "cohere": CohereError,
    "v1": V1Error,
    "tei": TeiError,
    "as2ray": RankError,
}

STATUS: dict[Kind, int] = {
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

TEI_TYPES: dict[Kind, str] = {
    "empty": "Empty",
    "malformed": "Tokenizer",
    "invalid": "Tokenizer",
    "overloaded": "Overloaded",
    "too_late": "Overloaded",
    "failed": "Backend",
}
"""The rest are its `Validation`."""


def no(refused: Refused, dialect: Dialect) -> Wire:
    """A refusal in a dialect's form."""
    told = refused.told
    if dialect == "cohere":
        return CohereError(message=told)
    if dialect == "v1":
        return V1Error(message=told, detail=told)
    if dialect == "tei":
        kind: Any = TEI_TYPES.get(refused.kind, "Validation")
        return TeiError(error=told, error_type=kind)
    return RankError(
        error=refused.kind, came=refused.came, expected=refused.expected, mend=refused.mend
    )


def status(refused: Refused, dialect: Dialect, overloaded: int = 429) -> int:
    """Its HTTP status; Text Embeddings Inference has one of its own for a failing backend."""
    if refused.kind == "overloaded":
        return overloaded
    return 424 if (refused.kind, dialect) == ("failed", "tei") else STATUS[refused.kind]


def statuses(dialect: Dialect, overloaded: int = 429) -> list[int]:
    """All that a ranking of this dialect may answer in place of 200."""
    kinds = (Refused(kind, "", expected="", mend="") for kind in get_args(Kind))
    return sorted({status(refused, dialect, overloaded) for refused in kinds})
