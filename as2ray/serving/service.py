"""What the web asks of whatever ranks behind it.

Knows the service's question and answer. Must not know HTTP or Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from as2ray.serving.settings import Limits
from as2ray.serving.types import RequestError, RerankRequest, RerankResult


@dataclass(frozen=True)
class ModelInfo:
    """What a client may want to know of a ranker."""

    max_length: int
    """Most tokens of a pair."""
    exit_layers: tuple[int, ...]
    drop_ratios: tuple[float, ...]
    threshold: float | None = None
    """Score below which its best answer is better not given, where it was calibrated."""


@dataclass(frozen=True)
class RequestRecord:
    """What is told of a request when it is over, for metrics and the log."""

    path: str
    status_code: int
    duration_s: float
    request: RerankRequest | None
    result: RerankResult | None
    error: RequestError | None


class RankingService(Protocol):
    """Ranks, wherever that happens."""

    @property
    def models(self) -> Mapping[str, str]:
        """Checkpoint of each name; the first is the default."""

    async def rank(self, request: RerankRequest, model: str) -> RerankResult:
        """The answer of a model by its name; raises Refused."""

    async def get_model_info(self, model: str) -> ModelInfo:
        """What that model is."""

    async def export_metrics(self) -> str:
        """All metrics in Prometheus's text format."""

    def record_request(self, record: RequestRecord) -> None:
        """Counts a request."""


def select_model(model: str | None, models: Mapping[str, str]) -> str:
    """The name of the model that answers.

    Clients of other services name those services' models. Where one model is served it answers
    whatever was named, and the answer says so; where several are, an unknown name is refused.
    """
    names = list(models)
    if model in models:
        return str(model)
    if model is None or len(names) == 1:
        return names[0]
    raise RequestError(
        "unknown_model",
        f"a model that is not served here; expected one of {names}",
        fix="name one of them, or none",
    )


def check_limits(request: RerankRequest, limits: Limits) -> None:
    """Refuses what is too large to look at, before anything is tokenised."""
    if not request.candidates:
        raise RequestError(
            "empty",
            "no candidates; expected at least one",
            fix="send the texts to rank",
        )
    if len(request.candidates) > limits.max_candidates:
        raise RequestError(
            "too_large",
            f"{len(request.candidates):,} candidates; expected at most {limits.max_candidates:,}",
            fix="send the best of an earlier stage, such as keyword search",
        )
    longest = max(len(request.question), *map(len, request.candidates))
    if longest > limits.max_text_chars:
        raise RequestError(
            "too_large",
            f"a text of {longest:,} characters; expected at most {limits.max_text_chars:,}",
            fix="split it into sentences",
        )
