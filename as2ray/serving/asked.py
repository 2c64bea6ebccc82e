"""What passes inside the service, whatever dialect the client speaks: a question, an answer, a no.

Knows the ranked candidate. Must not know HTTP, Ray or any one client's dialect.
"""

from dataclasses import dataclass, field
from typing import Literal

from as2ray.errors import As2rayError
from as2ray.records import Ranked

Kind = Literal[
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
class Asked:
    """One question with its candidates."""

    question: str
    candidates: list[str]
    model: str | None = None
    """A name; the first model by default."""
    drop: float | list[float] | None = None
    """Drop ratio after each stage but the last; by default the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A ranking, and what it took."""

    model: str
    ranking: list[Ranked]
    """Best first."""
    tokens: int
    """Of all pairs, special tokens included."""
    exits: tuple[int, ...] = ()
    """Layers after which candidates could leave; none of a ranker of one piece."""
    survivors: tuple[int, ...] = ()
    """Candidates that each exit scored."""
    drop: tuple[float, ...] = ()
    """Drop ratio after each exit but the last, as it was used."""
    relieved: bool = False
    """Whether the ratios were raised because too many waited."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each step: `read` (tokenising), `queue` (waiting for a batch), `rank`."""


class Refused(As2rayError):
    """A request that gets no ranking.

    Args:
        kind: Why.
        came: What came; never the texts themselves, a path or a trace.
        expected: What would have been accepted.
        mend: What to do now.
        retry_after: Seconds until it makes sense to ask again, where that helps.
    """

    def __init__(
        self, kind: Kind, came: str, *, expected: str, mend: str, retry_after: int | None = None
    ) -> None:
        super().__init__(came, expected=expected, mend=mend)
        self.kind, self.retry_after = kind, retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.kind, self.came, self.expected, self.mend, self.retry_after)

    @property
    def told(self) -> str:
        """All of it on one line."""
        return f"{self.came}; expected: {self.expected}; to mend: {self.mend}"


def _again(kind: Kind, came: str, expected: str, mend: str, retry_after: int | None) -> Refused:
    return Refused(kind, came, expected=expected, mend=mend, retry_after=retry_after)


def too_late(seconds: float) -> Refused:
    """Nobody would wait that long."""
    return Refused(
        "too_late",
        f"no answer within {seconds:g} s",
        expected="a service less busy, or fewer candidates",
        mend="ask again later, or with fewer candidates",
        retry_after=max(1, round(seconds)),
    )


def failed() -> Refused:
    """Our fault; the reason stands in the log."""
    return Refused(
        "failed",
        "the service failed on this request",
        expected="a ranking",
        mend="ask again; if it fails again, tell the operator the request's time",
    )
