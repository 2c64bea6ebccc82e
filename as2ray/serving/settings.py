"""What an operator decides: models, limits, batches, replicas; YAML's `args` of the application.

Knows pydantic. Must not import Ray: the command line reads these before Ray is up.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from as2ray.errors import ConfigError
from as2ray.tables.schema import MAX_TEXT_CHARS

MODEL_CONFIG = ConfigDict(extra="forbid", frozen=True)


def from_validation_error(error: ValidationError) -> ConfigError:
    """The first of its complaints as an error of ours."""
    first = error.errors()[0]
    where, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return ConfigError(
        f"{where}={first['input']!r}"
        if where
        else what + "; expected " + what
        if where
        else "settings that fit one another",
    )


class Limits(BaseModel):
    """What one request may ask."""

    model_config = MODEL_CONFIG
    max_candidates: int = Field(default=1_000, ge=1)
    max_text_chars: int = Field(default=MAX_TEXT_CHARS // 10, ge=1, le=MAX_TEXT_CHARS)
    """Of a question or a candidate."""
    max_request_tokens: int = Field(default=131_072, ge=512)
    """Of all pairs together, after each was cut to the ranker's length."""
    max_body_bytes: int = Field(default=8_000_000, ge=1_024)
    max_drop_ratio: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Highest drop ratio that a request may ask."""
    request_timeout_s: float = Field(default=30.0, gt=0.0)
    """Until an answer; then 503."""


class BatchingConfig(BaseModel):
    """How requests are ranked together, and what happens where there are too many."""

    model_config = MODEL_CONFIG
    max_batch_tokens: int = Field(default=16_384, ge=512)
    """Of a batch; a larger question goes alone."""
    max_queued_tokens: int = Field(default=262_144, ge=512)
    """That may wait at a replica; what comes then is refused."""
    max_ongoing_requests: int = Field(default=256, ge=1)
    """That a replica reads and ranks at a time (Serve's max_ongoing_requests)."""
    max_queued_requests: int = Field(default=256, ge=1)
    """That wait for a replica at each gateway (Serve's max_queued_requests)."""
    start_at_fill: float = Field(default=0.5, ge=0.0, le=1.0)
    """Part of the waiting room that is full when drop ratios begin to rise."""
    max_drop_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """What they rise to when it is full; by default they stay."""

    def drop_ratio_at(self, fill_level: float) -> float:
        """The drop ratio that those below it are raised to, in a waiting room so full (0 to 1)."""
        if self.max_drop_ratio is None or fill_level <= self.start_at_fill:
            return 0.0
        return self.max_drop_ratio * (fill_level - self.start_at_fill) / (1.0 - self.start_at_fill)


class ReplicasConfig(BaseModel):
    """What of the cluster the ranker takes."""

    model_config = MODEL_CONFIG
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=8.0, gt=0.0)
    """Requests at a replica at which another is started (Serve's target_ongoing_requests)."""
    num_cpus: float = Field(default=1.0, gt=0.0)
    """Of each replica; also the threads of its matrix products, rounded up."""
    num_gpus: float = Field(default=0.0, ge=0.0)
    num_gateways: int = Field(default=1, ge=1)
    """Replicas that speak HTTP."""
    gateway_num_cpus: float = Field(default=0.2, ge=0.0)

    @model_validator(mode="after")
    def _check_bounds(self) -> "ReplicasConfig":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"least={self.min_replicas} above most={self.max_replicas}")
        return self


class Settings(BaseModel):
    """All but the models, which change while the service runs."""

    model_config = MODEL_CONFIG
    max_models_per_replica: int = Field(default=2, ge=1)
    """That a replica holds at a time; the one least lately used goes."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    limits: Limits = Limits()
    batching: BatchingConfig = BatchingConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    overload_status_code: Literal[429, 503] = 429
    """Status where too many wait."""
    index_path: str | None = None
    """What `as2ray index` wrote; `/ask` answers from it. The head, where the application is built,
    and every gateway's machine must see it."""
    auth_token_file: str | None = None
    """A file with one bearer token a line; without it everybody who reaches the port may ask. Seen
    as the index is."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may ask."""
    enable_demo_page: bool = True
    """Whether `/` shows a page to try the ranker on."""
    log_request_texts: bool = False
    """Whether the log holds questions and candidates; they are the users'."""

    @model_validator(mode="after")
    def _check_token_limits(self) -> "Settings":
        if self.limits.max_request_tokens > self.batching.max_queued_tokens:
            raise ValueError(
                f"limits.tokens={self.limits.max_request_tokens} above "
                f"batches.waiting_tokens={self.batching.max_queued_tokens}: it could never be ranked"
            )
        return self


class ServiceConfig(Settings):
    """All of it: the arguments of the application."""

    models: dict[Annotated[str, Field(pattern=r"^[!-~]+$")], str] = Field(min_length=1)
    """Checkpoint folder or hub id of each name; the first answers where none is named."""

    @classmethod
    def from_models(cls, models: dict[str, str], settings: Settings) -> "ServiceConfig":
        """Models with settings; an error of ours where they do not fit."""
        try:
            return cls.model_validate({"models": models, **settings.model_dump()})
        except ValidationError as error:
            raise from_validation_error(error) from None

    @property
    def settings(self) -> Settings:
        """Without the models."""
        return Settings.model_validate(self.model_dump(exclude={"models"}))


def read_auth_tokens(path: str | None) -> tuple[str, ...]:
    """The bearer tokens of a file, one a line; none without a file."""
    if path is None:
        return ()
    try:
        with open(path, encoding="utf-8") as lines:
            tokens = tuple(line.strip() for line in lines if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        tokens = ()
        came = f"token_file {path}: {error}"
    else:
        came = f"token_file {path} holds no token"
    if not tokens:
        raise ConfigError(
            f"{came}; expected a file with one token a line",
        )
    return tokens
