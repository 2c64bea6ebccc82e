"""Configuration of the service: models, limits, batching, load shedding and replicas.

A Serve config file gives `ServiceConfig` as the `args` of the application. This module does not
import Ray: the command line reads settings before Ray starts.
"""

import re
import stat
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from as2ray.errors import ConfigError, from_validation_error
from as2ray.tables.schema import MAX_TEXT_CHARS

DropRatio = Annotated[float, Field(ge=0, lt=1)]
"""Share of the candidates that is dropped after an exit."""


class ConfigModel(BaseModel):
    """Base of all settings: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(ConfigModel):
    """Limits of one request."""

    max_candidates: PositiveInt = 1_000
    """Maximum number of candidates of a request."""
    max_text_chars: Annotated[int, Field(ge=1, le=MAX_TEXT_CHARS)] = MAX_TEXT_CHARS // 10
    """Maximum number of characters of a question or candidate."""
    max_request_tokens: Annotated[int, Field(ge=512)] = 131_072
    """Maximum number of tokens of all pairs, each truncated to the ranker's maximum length."""
    max_body_bytes: Annotated[int, Field(ge=1_024)] = 8_000_000
    """Maximum size of the body of a request."""
    max_drop_ratio: DropRatio = 0.9
    """Highest drop ratio that a request may set."""
    request_timeout_s: PositiveFloat = 30.0
    """Time to a result, after which the response is 503."""


class BatchingConfig(ConfigModel):
    """How many requests are ranked together, and how many may wait."""

    max_batch_tokens: Annotated[int, Field(ge=512)] = 16_384
    """Token budget of a batch. A larger request is ranked alone."""
    max_queued_tokens: Annotated[int, Field(ge=512)] = 262_144
    """Tokens that may be queued at a replica; requests beyond them are rejected."""
    max_queue_s: PositiveFloat | None = None
    """Seconds of work that may be queued at a replica, at the measured rate of its batches;
    requests beyond them are rejected. By default only `max_queued_tokens` bounds the queue."""
    max_ongoing_requests: PositiveInt = 256
    """Requests that a replica tokenizes and ranks at the same time (Ray Serve's setting)."""
    max_queued_requests: PositiveInt = 256
    """Requests that each gateway queues for a replica (Ray Serve's setting)."""


class LoadSheddingConfig(ConfigModel):
    """How a cascade's drop ratios rise while the queue of a replica fills.

    Requests that set their own drop ratios keep them.
    """

    start_at_fill: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Fill level of the queue (0 to 1) above which drop ratios rise."""
    max_drop_ratio: DropRatio | None = None
    """Drop ratio at a full queue; by default drop ratios do not rise."""

    def drop_ratio_at(self, fill_level: float) -> float:
        """Returns the ratio to which lower drop ratios are raised at a fill level of 0 to 1."""
        if self.max_drop_ratio is None or fill_level <= self.start_at_fill:
            return 0.0
        return self.max_drop_ratio * (fill_level - self.start_at_fill) / (1.0 - self.start_at_fill)


class ReplicasConfig(ConfigModel):
    """Number and resources of ranker replicas and gateways."""

    min_replicas: NonNegativeInt = 1
    """Replicas that run without requests."""
    max_replicas: PositiveInt = 1
    """Replicas that run at most; more than `min_replicas` lets Ray Serve scale."""
    target_ongoing_requests: PositiveFloat = 8.0
    """Requests per replica above which Ray Serve starts another (Ray Serve's setting)."""
    num_cpus: PositiveFloat = 1.0
    """CPU cores of each replica. Rounded up, also its number of threads."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs of each replica; a fraction lets replicas share one."""
    num_gateways: PositiveInt = 1
    """Replicas of the gateway, which speaks HTTP."""
    gateway_num_cpus: NonNegativeFloat = 0.2
    """CPU cores that Ray reserves for each gateway."""
    max_surge_percent: NonNegativeInt = 100
    """Replicas that a deployment of new arguments or code starts beside the old ones, which answer
    until the new ones are healthy (Ray Serve's setting). 0 stops old ones first, for clusters
    without room."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "ReplicasConfig":
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}"
            )
        return self


class Settings(ConfigModel):
    """All settings but the models, which can change while the service runs."""

    max_models_per_replica: PositiveInt = 2
    """Models that a replica holds; the least recently used one is evicted."""
    dtype: Literal["auto", "int8", "fp32", "bf16", "fp16"] = "auto"
    """Number format of matrix products; `/info` says what `auto` has picked."""
    limits: Limits = Limits()
    batching: BatchingConfig = BatchingConfig()
    load_shedding: LoadSheddingConfig = LoadSheddingConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    drain_timeout_s: PositiveFloat = 30.0
    """Seconds that `as2ray serve` still answers accepted requests after it is told to end."""
    overload_status_code: Literal[429, 503] = 429
    """Status of a request that is rejected because the queue is full."""
    index_path: str | None = None
    """Output folder of `as2ray index`, from which `/ask` answers. It must be readable on the head
    node, where the application is built, and on every node with a gateway."""
    auth_token_file: str | None = None
    """File with one bearer token per line; without it the service needs no token. Must be readable
    on the same nodes as the index."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may send requests."""
    allowed_hosts: tuple[str, ...] = ()
    """Values of the header `Host` that are answered, without port; by default all, and with
    `as2ray serve` on a loopback address the names of this machine. They keep web pages from
    reaching the service under a name of their own (DNS rebinding)."""
    enable_demo_page: bool = True
    """Whether `/` serves the demo page."""
    log_request_texts: bool = False
    """Whether the log contains questions and candidates, which may be personal data."""

    @model_validator(mode="after")
    def _check_token_limits(self) -> "Settings":
        if self.limits.max_request_tokens > self.batching.max_queued_tokens:
            raise ValueError(
                f"limits.max_request_tokens={self.limits.max_request_tokens} is above "
                f"batching.max_queued_tokens={self.batching.max_queued_tokens}"
            )
        return self


class ServiceConfig(Settings):
    """The arguments of the application: settings and models."""

    models: dict[str, str] = {}
    """Checkpoint folder or Hugging Face Hub id of each model's name, which has visible ASCII
    characters alone; the first is the default.
    Without models the service answers from the index alone, as `as2ray ask` does."""

    @model_validator(mode="after")
    def _check_models(self) -> "ServiceConfig":
        for name in self.models:
            if re.fullmatch(r"[!-~]+", name) is None:
                problem = f"the name of the model {name!r} must be of visible ASCII characters"
                raise ValueError(problem)
        if not self.models and self.index_path is None:
            raise ValueError("neither models nor an index_path is given")
        return self

    @classmethod
    def from_models(cls, models: dict[str, str], settings: Settings) -> "ServiceConfig":
        """Adds models to settings.

        Raises:
            ConfigError: A name is not of visible ASCII characters, or the settings contradict.
        """
        try:
            return cls.model_validate({"models": models, **settings.model_dump()})
        except ValidationError as error:
            raise from_validation_error(error) from None

    @property
    def settings(self) -> Settings:
        """The settings without the models."""
        return Settings.model_validate(self.model_dump(exclude={"models"}))


def read_auth_tokens(path: str | None) -> tuple[str, ...]:
    """Reads bearer tokens from a file with one token per line; returns none without a file.

    Raises:
        ConfigError: The file cannot be read, is open to others, or contains no token.
    """
    if path is None:
        return ()
    try:
        mode = Path(path).stat().st_mode
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"auth_token_file {path} is not a text file with one token per line: {error}"
        raise ConfigError(problem) from error
    # A group may read it: so does Kubernetes mount a secret for a user who is not root.
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        problem = f"auth_token_file {path} can be read or written by others"
        raise ConfigError(problem, fix=f"chmod 600 {path}")
    tokens = tuple(line.strip() for line in lines if line.strip())
    if not tokens:
        raise ConfigError(f"auth_token_file {path} is empty; it must have one token per line")
    return tokens
