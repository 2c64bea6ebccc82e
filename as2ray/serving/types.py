"""The requests, results and errors of the service, independent of any client's dialect."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, Protocol
from uuid import uuid4

from as2ray.cascade.margins import Margins
from as2ray.errors import As2rayError, EvaluationError
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.text.input_checks import check_text

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

CLOCK_ID = BOOT_ID.read_text() if BOOT_ID.exists() else str(uuid4())
"""Identifies the monotonic clock of this process; processes of one machine share it on Linux."""

ErrorCode = Literal[
    "invalid_json",
    "invalid_request",
    "no_candidates",
    "too_large",
    "unauthorized",
    "host_not_allowed",
    "body_timeout",
    "model_not_found",
    "not_found",
    "overloaded",
    "timeout",
    "unavailable",
    "internal_error",
]
"""Why a request fails; `error_responses` maps each code to a status and a body in each dialect."""


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """The time in which a request should be answered, counted from its arrival.

    Processes of one machine share a monotonic clock. On another machine the budget counts from when
    it receives the request, less what had passed when the request was sent.
    """

    budget_ms: float
    """Milliseconds, above 0."""
    arrived_at: float
    """When the request arrived, by the monotonic clock of the process that received it."""
    sent_after_s: float = 0.0
    """Seconds from the arrival until the request was sent to a replica."""
    clock_id: str = CLOCK_ID
    """Whose monotonic clock it is."""

    @property
    def ends_at(self) -> float:
        """When the time is over, by this process' monotonic clock."""
        budget_s = self.budget_ms / 1e3
        if self.clock_id == CLOCK_ID:
            return self.arrived_at + budget_s
        return time.monotonic() + budget_s - self.sent_after_s

    @property
    def exceeded_ms(self) -> float:
        """By how many milliseconds the time is over now; 0 if it is not."""
        return max(0.0, round(1e3 * (time.monotonic() - self.ends_at), 3))

    def sent_now(self) -> "TimeBudget":
        """Returns it with the time that has passed."""
        return replace(self, sent_after_s=time.monotonic() - self.arrived_at)


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A question with its candidates."""

    question: str
    candidates: list[str]
    model: str
    """Name of the model that ranks, one of those that are served."""
    drop_ratios: float | list[float] | None = None
    """Drop ratio after each stage but the last; by default the checkpoint's."""
    client: str | None = None
    """Who asks, where clients have different tokens; they share the ranker evenly."""
    budget: TimeBudget | None = None
    """Time in which it should be ranked."""
    checkpoint: str | None = None
    """Checkpoint of the model; by default the one that its name has when the request is sent."""


@dataclass(frozen=True, slots=True)
class CandidateScore:
    """The score of one candidate; its text stays in the request."""

    index: int
    """Position in the request's list of candidates."""
    score: float
    """Probability that the candidate answers the question, or its logit."""
    exit_layer: int | None = None
    """Layer after which the candidate was scored; None for a ranker without exits."""
    is_logit: bool = False
    """Whether the score is a logit, as the checkpoint's `activation_fn` says."""


@dataclass(frozen=True, slots=True)
class RerankResult:
    """A ranking, and how it was computed."""

    model: str
    ranking: list[CandidateScore]
    """Best first."""
    num_tokens: int
    """Tokens of all pairs, special tokens included."""
    exit_layers: tuple[int, ...] = ()
    """Layers after which candidates can be dropped; empty for a ranker without exits."""
    num_scored: tuple[int, ...] = ()
    """Number of candidates that each exit scored."""
    drop_ratios: tuple[float, ...] = ()
    """Drop ratio that was used after each exit but the last."""
    load_shed: bool = False
    """Whether drop ratios were raised because the queue was too full, or time was left to other
    requests with a budget."""
    budget_ms: float | None = None
    """Milliseconds from the request's arrival in which it should be ranked."""
    budget_exceeded_ms: float | None = None
    """By how much that was exceeded, 0 if it was not; None without a budget."""
    timings_s: dict[str, float] = field(default_factory=dict)
    """Duration of each phase: `tokenize`, `queue` (waiting for a batch), `inference`; for `/ask`
    also `retrieval`."""

    @property
    def num_ranked(self) -> int:
        """Number of candidates that the ranker was given."""
        return len(self.ranking)

    @property
    def timings_ms(self) -> dict[str, float]:
        """The same in milliseconds, rounded to microseconds."""
        return {phase: round(1e3 * seconds, 3) for phase, seconds in self.timings_s.items()}


class RequestError(As2rayError):
    """A request that gets no ranking.

    Args:
        code: The reason, for programs.
        problem: The reason, for people; never contains a path, a traceback or the request's texts.
        fix: What the client can do about it.
        retry_after: Seconds after which a retry may succeed.
    """

    def __init__(
        self, code: ErrorCode, problem: str, fix: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(problem, fix)
        self.code, self.retry_after = code, retry_after
        self.args = (code, problem, fix, retry_after)  # pickling passes them to the constructor

    @property
    def message(self) -> str:
        """Problem and fix on one line."""
        return self.problem if self.fix is None else f"{self.problem}; {self.fix}"


def overloaded_error(problem: str, retry_after: int) -> RequestError:
    """Returns the error of a request that is rejected because too many are queued."""
    return RequestError("overloaded", problem, f"retry in {retry_after} s", retry_after)


def timeout_error(waited_s: float | None) -> RequestError:
    """Returns the error of a request that was not ranked in time, if known within `waited_s`."""
    problem = "no result in time" if waited_s is None else f"no result within {waited_s:.3g} s"
    fix = "retry later, or send fewer candidates"
    return RequestError("timeout", problem, fix, max(1, round(waited_s or 1)))


def unavailable_error(problem: str, reason: str) -> RequestError:
    """Returns the error of a request that nobody can rank at present."""
    return RequestError("unavailable", f"{problem}: {reason}", "retry in 5 s", retry_after=5)


def internal_error() -> RequestError:
    """Returns the error of a request on which the service failed; the log has the cause."""
    fix = "retry; if the request fails again, report its time to the operator"
    return RequestError("internal_error", "the service failed on this request", fix)


def check_size(size: int, limit: int, unit: str, fix: str) -> None:
    """Checks a size of a request, in some unit.

    Raises:
        RequestError: The size is over the limit.
    """
    if size > limit:
        raise RequestError("too_large", f"{size:,} {unit}, the limit is {limit:,}", fix)


def check_request_texts(request: RerankRequest) -> None:
    """Checks that a tokenizer can read the question and every candidate.

    Raises:
        RequestError: A text is blank, or contains half of a surrogate pair.
    """
    texts = {"the question": request.question}
    texts |= {f"candidate {i}": text for i, text in enumerate(request.candidates)}
    for name, text in texts.items():
        try:
            check_text(text)
        except EvaluationError:
            problem = f"{name} is blank or contains half of a surrogate pair"
            raise RequestError("invalid_request", problem) from None


@dataclass(frozen=True)
class ModelInfo:
    """What a client can learn about a model."""

    max_length: int
    """Maximum number of tokens of a pair."""
    exit_layers: tuple[int, ...]
    drop_ratios: tuple[float, ...]
    margins: Margins | None = None
    """Margins that drop candidates instead of the ratios, with the bound on what they lose."""
    bm25_margin: float | None = None
    """Margin of BM25 below which candidates leave before the first layer, in log-odds."""
    bm25_weights: tuple[float, ...] = ()
    """Weight of BM25 in the log-odds of each exit; 0 without it."""
    threshold: float | None = None
    """Score below which the best candidate should not be given as an answer, if the model is
    calibrated."""
    answer_scoring: AnswerScoring | None = None
    """How its scores and those of an index are combined, if that was fitted."""
    family: str = ""
    """`model_type` of the encoder; empty for an ensemble."""
    head: str = ""
    """Class of the network with its head."""
    activation: str = "sigmoid"
    """What a score is: a probability, or its logit (`identity`)."""
    dtype: str = ""
    """Number format of its matrix products."""


NO_MODEL: Final = ModelInfo(max_length=0, exit_layers=(), drop_ratios=())
"""Description of a service with an index and no model."""


@dataclass(frozen=True)
class RequestRecord:
    """A finished HTTP request, for metrics and the log."""

    request_id: str
    path: str
    status_code: int
    duration_s: float
    request: RerankRequest | None
    result: RerankResult | None
    error: RequestError | None


class RankingService(Protocol):
    """What the HTTP application needs of the service behind it."""

    @property
    def models(self) -> Mapping[str, str]:
        """Checkpoint of each model's name; the first is the default. There may be none."""

    async def rank(self, request: RerankRequest) -> RerankResult:
        """Ranks the candidates of a request.

        Raises:
            RequestError: The service is overloaded, too slow, or rejects the request.
        """

    async def get_model_info(self, model: str) -> ModelInfo:
        """Returns the description of a model."""

    async def export_metrics(self) -> str:
        """Returns all metrics in Prometheus's text format."""

    @property
    def model_problem(self) -> str | None:
        """Why the last change of models was rejected; None if it was not."""

    def check_rankers(self) -> None:
        """Checks that a ranker has responded lately; returns at once.

        Raises:
            RequestError: None has.
        """

    def record_request(self, record: RequestRecord) -> None:
        """Counts a finished request."""
