"""The service on Ray Serve: gateways that speak HTTP, before replicas that rank.

Knows Ray Serve. Must hold no ranking logic: `desk`, `line` and `web` do the work.

`import_path: as2ray.serving.deployment:build`, with `args` as in `settings.Served`. Requests go to
a replica that holds their model (multiplexing); its checkpoint is the model's id, so a name whose
checkpoint changes by `user_config` is another model, loaded beside the old one while that answers.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from as2ray.checkpoints.loading import load
from as2ray.distributed.cluster import WORKER_ENVIRONMENT
from as2ray.models.encoder.cpu_parallel import set_num_threads
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.app import create_app
from as2ray.serving.batch_queue import BatchQueue
from as2ray.serving.engine import RerankEngine, TokenizedRequest, rank_batch
from as2ray.serving.metrics import ServiceMetrics, collect_metrics
from as2ray.serving.service import ModelInfo, RequestRecord
from as2ray.serving.settings import ReplicasConfig, ServiceConfig, Settings, read_auth_tokens
from as2ray.serving.types import RequestError, RerankRequest, RerankResult, timeout_error

REPLICA_DIED = (RayActorError, ReplicaUnavailableError)
"""A replica died with a question in hand; another can rank it as well."""

MAX_CONCURRENT_BATCHES = 2
"""Most batches that a replica ranks at a time, each with its part of the cores."""

PROBE_AFTER_S = 10.0
"""Seconds for which an answer shows that replicas live; later one is asked."""

METRIC_PATHS = (
    *("/", "/ask", "/rank", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/info", "/health", "/metrics"),
)
"""That metrics tell apart."""


def build_app(config: ServiceConfig) -> serve.Application:
    """The application.

    Args:
        args: All that an operator decides.
    """
    # What is not there is told here, not by a dying replica.
    read_auth_tokens(config.auth_token_file)
    if config.index_path:
        SentenceIndex.open(config.index_path)
    settings, models = config.settings, {"models": config.models}
    ranker = serve.deployment(
        _create_replica_class(settings.max_models_per_replica), name="ranker"
    ).options(
        ray_actor_options={
            "num_cpus": config.replicas.num_cpus,
            "num_gpus": config.replicas.num_gpus,
            "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
        },
        max_ongoing_requests=config.batching.max_ongoing_requests,
        max_queued_requests=config.batching.max_queued_requests,
        graceful_shutdown_timeout_s=2 * config.limits.request_timeout_s,
        user_config=models,
        **_scaling_options(config.replicas),
    )
    gateway = serve.deployment(Gateway, name="gateway").options(
        num_replicas=config.replicas.num_gateways,
        ray_actor_options={"num_cpus": config.replicas.gateway_num_cpus},
        max_ongoing_requests=config.batching.max_ongoing_requests * config.replicas.max_replicas
        + config.batching.max_queued_requests,
        max_queued_requests=config.batching.max_queued_requests,
        # Serve's own 20 s would end a replica that goes before its last answers are given.
        graceful_shutdown_timeout_s=2 * config.limits.request_timeout_s,
        backpressure_config={"status_code": config.overload_status_code, "retry_after_s": 1},
        user_config=models,
    )
    return gateway.bind(ranker.bind(settings), settings)


def _scaling_options(replicas: ReplicasConfig) -> dict[str, Any]:
    if replicas.min_replicas == replicas.max_replicas:
        return {"num_replicas": replicas.max_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
        }
    }


def _create_replica_class(max_models_per_replica: int) -> type:
    """The class of replicas that hold so many models."""

    class Replica:
        """Rankers behind one line."""

        def __init__(self, settings: Settings) -> None:
            self.cores = math.ceil(settings.replicas.num_cpus)
            self.settings, batches = settings, settings.batching
            self.line = BatchQueue(
                self._rank,
                batches.max_batch_tokens,
                batches.max_queued_tokens,
                min(MAX_CONCURRENT_BATCHES, self.cores),
            )

        async def reconfigure(self, config: Mapping[str, Any]) -> None:
            """Loads models before they are asked for, as many as there is room for."""
            for checkpoint in list(config["models"].values())[:max_models_per_replica]:
                await self.desk(checkpoint)

        @serve.multiplexed(max_num_models_per_replica=max_models_per_replica)  # type: ignore[untyped-decorator]
        async def desk(self, checkpoint: str) -> RerankEngine:
            """The desk of a checkpoint that has ranked once, so that no client waits for what the
            first ranking makes: 0.4 s on two cores."""
            ranker = await asyncio.to_thread(load, checkpoint, precision=self.settings.dtype)
            await asyncio.to_thread(ranker.rank, "question", ["candidate"])
            return RerankEngine(ranker, self.settings.limits)

        async def rank(self, asked: RerankRequest, within: float) -> RerankResult | RequestError:
            """The answer, or why there is none: as a value, an error would lose its type."""
            desk = await self.desk(serve.get_multiplexed_model_id())
            try:
                read = await asyncio.to_thread(desk.read, asked)
                return await self.line.submit(read, within)
            except RequestError as refused:
                return refused

        async def facts(self) -> ModelInfo:
            """What the model is."""
            desk: RerankEngine = await self.desk(serve.get_multiplexed_model_id())
            return desk.model_info

        def _rank(
            self, batch: Sequence[TokenizedRequest], fullness: float, at_work: int
        ) -> list[RerankResult]:
            set_num_threads(max(1, self.cores // at_work))
            return rank_batch(batch, self.settings.batching.drop_ratio_at(fullness))

    return Replica


@serve.ingress()
class Gateway:
    """Speaks HTTP, and asks the replicas.

    Args:
        ranker: The replicas.
        settings: The operator's.
    """

    def __init__(self, ranker: DeploymentHandle, settings: Settings) -> None:
        self.ranker, self.settings = ranker, settings
        self.models: dict[str, str] = {}
        self.model_infos: dict[str, ModelInfo] = {}
        """Of checkpoints."""
        self.last_response_at = -math.inf
        """When a replica last answered, in seconds of the monotonic clock."""
        self.service_metrics = ServiceMetrics()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for it once the gateway is made."""
        where = self.settings.index_path
        index = SentenceIndex.open(where) if where else None
        return create_app(
            self, self.settings, read_auth_tokens(self.settings.auth_token_file), index
        )

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Other models answer, each as soon as a replica holds it; until then the old ones do."""
        models = ServiceConfig.model_validate({"models": config["models"]}).models
        if self.models:
            new = set(models.values()) - set(self.models.values())
            await asyncio.gather(
                *(self._get_handle(checkpoint).facts.remote() for checkpoint in new)
            )
        self.models = models

    def _get_handle(self, checkpoint: str) -> DeploymentHandle:
        return self.ranker.options(multiplexed_model_id=checkpoint)

    async def rank(self, request: RerankRequest, model: str) -> RerankResult:
        """The answer of a model."""
        request, within = replace(request, model=model), self.settings.limits.request_timeout_s
        found = await self._call_replica(self.models[model], "rank", request, within)
        if isinstance(found, RequestError):
            raise found
        return found  # type: ignore[no-any-return]

    async def get_model_info(self, model: str) -> ModelInfo:
        """What a model is, from a replica that lives.

        While replicas answer, with any model, they are not asked, so that the health of a busy
        service does not wait in line, nor load a model in another's place; nor where none need
        live, as a probe would keep one from ending.
        """
        checkpoint = self.models[model]
        silent = time.monotonic() - self.last_response_at > PROBE_AFTER_S
        if checkpoint not in self.model_infos or (silent and self.settings.replicas.min_replicas):
            self.model_infos[checkpoint] = await self._call_replica(checkpoint, "facts")
        return self.model_infos[checkpoint]

    async def _call_replica(self, checkpoint: str, method_name: str, *args: object) -> Any:
        """What a replica says; asked again once if it dies."""
        method, within = (
            getattr(self._get_handle(checkpoint), method_name),
            self.settings.limits.request_timeout_s,
        )
        try:
            async with asyncio.timeout(within):
                try:
                    found = await method.remote(*args)
                except REPLICA_DIED:
                    found = await method.remote(*args)
        except BackPressureError:
            raise _overloaded_error() from None
        except (TimeoutError, DeploymentUnavailableError, *REPLICA_DIED):
            raise timeout_error(within) from None
        self.last_response_at = time.monotonic()
        return found

    async def export_metrics(self) -> str:
        """Of all gateways."""
        return await collect_metrics()

    def record_request(self, record: RequestRecord) -> None:
        """Counts a request."""
        self.service_metrics.record_request(record, METRIC_PATHS)


def _overloaded_error() -> RequestError:
    return RequestError(
        "overloaded",
        "too many requests wait for a replica; expected a service less busy",
        fix="ask again in 1 s",
        retry_after=1,
    )
