"""What the web asks of whatever ranks behind it.

Knows the service's question and answer. Must not know HTTP or Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from as2ray.serving.asked import Answer, Asked, Refused
from as2ray.serving.settings import Limits


@dataclass(frozen=True)
class Facts:
    """What a client may want to know of a ranker."""

    max_length: int
    """Most tokens of a pair."""
    exits: tuple[int, ...]
    drop: tuple[float, ...]
    threshold: float | None = None
    """Score below which its best answer is better not given, where it was calibrated."""


@dataclass(frozen=True)
class Seen:
    """What is told of a request when it is over, for metrics and the log."""

    path: str
    status: int
    seconds: float
    asked: Asked | None
    answer: Answer | None
    refused: Refused | None


class Service(Protocol):
    """Ranks, wherever that happens."""

    @property
    def models(self) -> Mapping[str, str]:
        """Checkpoint of each name; the first is the default."""

    async def rank(self, asked: Asked, model: str) -> Answer:
        """The answer of a model by its name; raises Refused."""

    async def facts(self, model: str) -> Facts:
        """What that model is."""

    async def metrics(self) -> str:
        """All metrics in Prometheus's text format."""

    def observe(self, seen: Seen) -> None:
        """Counts a request."""


def name_of(model: str | None, models: Mapping[str, str]) -> str:
    """The name of the model that answers.

    Clients of other services name those services' models. Where one model is served it answers
    whatever was named, and the answer says so; where several are, an unknown name is refused.
    """
    names = list(models)
    if model in models:
        return str(model)
    if model is None or len(names) == 1:
        return names[0]
    raise Refused(
        "unknown_model",
        "a model that is not served here",
        expected=f"one of {names}",
        mend="name one of them, or none",
    )


def check(asked: Asked, limits: Limits) -> None:
    """Refuses what is too large to look at, before anything is tokenised."""
    if not asked.candidates:
        raise Refused(
            "empty", "no candidates", expected="at least one", mend="send the texts to rank"
        )
    if len(asked.candidates) > limits.candidates:
        raise Refused(
            "too_large",
            f"{len(asked.candidates):,} candidates",
            expected=f"at most {limits.candidates:,}",
            mend="send the best of an earlier stage, such as keyword search",
        )
    longest = max(len(asked.question), *map(len, asked.candidates))
    if longest > limits.characters:
        raise Refused(
            "too_large",
            f"a text of {longest:,} characters",
            expected=f"at most {limits.characters:,}",
            mend="split it into sentences",
        )
