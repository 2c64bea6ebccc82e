"""What passes inside the service, whatever dialect the client speaks: a question, an answer, a no.

Knows the ranked candidate. Must not know HTTP, Ray or any one client's dialect.
"""

from dataclasses import dataclass, field
from typing import Literal

from as2ray.errors import As2rayError
from as2ray.outputs import RankedCandidate

ErrorCode = Literal[
    "malformed",
    "invalid",
    "empty",
    "too_large",
    "unauthorised",
    "unknown_model",
    "not_found",
    "overloaded",
    "too_late",
    "failed",
]
"""Why a request gets no ranking; each dialect has a status and a form for it."""


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """One question with its candidates."""

    question: str
    candidates: list[str]
    model: str | None = None
    """A name; the first model by default."""
    drop_ratios: float | list[float] | None = None
    """Drop ratio after each stage but the last; by default the checkpoint's."""


@dataclass(frozen=True, slots=True)
class RerankResult:
    """A ranking, and what it took."""

    model: str
    ranking: list[RankedCandidate]
    """Best first."""
    num_tokens: int
    """Of all pairs, special tokens included."""
    exit_layers: tuple[int, ...] = ()
    """Layers after which candidates could leave; none of a ranker of one piece."""
    num_scored: tuple[int, ...] = ()
    """Candidates that each exit scored."""
    drop_ratios: tuple[float, ...] = ()
    """Drop ratio after each exit but the last, as it was used."""
    load_shed: bool = False
    """Whether the ratios were raised because too many waited."""
    timings_s: dict[str, float] = field(default_factory=dict)
    """Of each step: `read` (tokenising), `queue` (waiting for a batch), `rank`."""


class RequestError(As2rayError):
    """A request that gets no ranking.

    Args:
        kind: Why.
        came: What came; never the texts themselves, a path or a trace.
        expected: What would have been accepted.
        mend: What to do now.
        retry_after: Seconds until it makes sense to ask again, where that helps.
    """

    def __init__(
        self,
        code: ErrorCode,
        problem: str,
        *,
        expected: str,
        fix: str,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(
            f"{problem}; expected {expected}",
            fix=fix,
        )
        self.code, self.retry_after = code, retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_request_error, (
            self.code,
            self.problem,
            self.expected,
            self.fix,
            self.retry_after,
        )

    @property
    def message(self) -> str:
        """All of it on one line."""
        return f"{self.problem}; expected: {self.expected}; to mend: {self.fix}"


def _rebuild_request_error(
    code: ErrorCode, problem: str, expected: str, fix: str, retry_after: int | None
) -> RequestError:
    return RequestError(
        code,
        f"{problem}; expected {expected}",
        fix=fix,
        retry_after=retry_after,
    )


def timeout_error(waited_s: float) -> RequestError:
    """Nobody would wait that long."""
    return RequestError(
        "too_late",
        f"no answer within {waited_s:g} s; expected a service less busy, or fewer candidates",
        fix="ask again later, or with fewer candidates",
        retry_after=max(1, round(waited_s)),
    )


def internal_error() -> RequestError:
    """Our fault; the reason stands in the log."""
    return RequestError(
        "failed",
        "the service failed on this request; expected a ranking",
        fix="ask again; if it fails again, tell the operator the request's time",
    )
