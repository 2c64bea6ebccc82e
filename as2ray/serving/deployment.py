"""The Ray Serve deployments: gateways, which speak HTTP, and replicas, which rank.

A Serve config file names `import_path: as2ray.serving.deployment:build_app`, with the fields of
`ServiceConfig` as `args`. Each request goes to a replica that holds its model (multiplexing). The
id of a model is its checkpoint: if `user_config` changes the checkpoint of a name, the new model is
loaded while the old one still ranks.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
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
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.distributed.cluster import WORKER_ENVIRONMENT
from as2ray.models.encoder.cpu_parallel import set_num_threads
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.question_answering import resolve_scoring
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.app import create_app
from as2ray.serving.batch_queue import BatchQueue
from as2ray.serving.engine import RerankEngine, TokenizedRequest, rank_batch
from as2ray.serving.metrics import ServiceMetrics, collect_metrics
from as2ray.serving.settings import ServiceConfig, Settings, read_auth_tokens
from as2ray.serving.types import (
    ModelInfo,
    RequestError,
    RequestRecord,
    RerankRequest,
    RerankResult,
    overloaded_error,
    timeout_error,
)

REPLICA_DIED = (RayActorError, ReplicaUnavailableError)
"""A replica died while it ranked a request; another replica can rank it."""

MAX_CONCURRENT_BATCHES = 2
"""Maximum number of batches that a replica ranks at the same time, each with its share of the
cores."""

PROBE_AFTER_S = 10.0
"""Seconds after the last response of a replica after which a health check probes one."""


def build_app(config: ServiceConfig) -> serve.Application:
    """Builds the application.

    Raises:
        ConfigError: The token file cannot be read.
        SentenceIndexError: The index cannot be read, or has embeddings of another encoder than a
            model was adapted with.
    """
    # Missing files are reported here, before replicas fail on them one after the other.
    read_auth_tokens(config.auth_token_file)
    if config.index_path:
        index = SentenceIndex.open(config.index_path, load_sentence_encoder)
        for checkpoint in config.models.values():
            resolve_scoring(index, AnswerScoring.read(checkpoint))
    settings, replicas = config.settings, config.replicas
    shared_options = {
        "max_queued_requests": config.batching.max_queued_requests,
        # Serve's default of 20 s would stop a gateway before its last responses are sent.
        "graceful_shutdown_timeout_s": 2 * config.limits.request_timeout_s,
        "user_config": {"models": config.models},
    }
    scaling_options: dict[str, Any] = {"num_replicas": replicas.max_replicas}
    if replicas.min_replicas < replicas.max_replicas:
        fields = {"min_replicas", "max_replicas", "target_ongoing_requests"}
        scaling_options = {"autoscaling_config": replicas.model_dump(include=fields)}
    ranker = serve.deployment(
        _create_replica_class(settings.max_models_per_replica),
        name="ranker",
        ray_actor_options={
            "num_cpus": replicas.num_cpus,
            "num_gpus": replicas.num_gpus,
            "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
        },
        max_ongoing_requests=config.batching.max_ongoing_requests,
        **scaling_options,
        **shared_options,
    )
    gateway = serve.deployment(
        Gateway,
        name="gateway",
        num_replicas=replicas.num_gateways,
        ray_actor_options={"num_cpus": replicas.gateway_num_cpus},
        max_ongoing_requests=config.batching.max_ongoing_requests * replicas.max_replicas
        + config.batching.max_queued_requests,
        backpressure_config={"status_code": config.overload_status_code, "retry_after_s": 1},
        **shared_options,
    )
    return gateway.bind(ranker.bind(settings), settings)


def _create_replica_class(max_models_per_replica: int) -> type:
    """Creates the class of replicas that hold up to `max_models_per_replica` models.

    `serve.multiplexed` needs the number when the class is defined.
    """

    class Replica:
        """Ranks requests in batches, with one queue for all models."""

        def __init__(self, settings: Settings) -> None:
            self.settings, batching = settings, settings.batching
            self.num_cores = math.ceil(settings.replicas.num_cpus)
            num_workers = min(MAX_CONCURRENT_BATCHES, self.num_cores)
            self.metrics = ServiceMetrics()
            self.queue = BatchQueue(
                self._rank_batch,
                batching.max_batch_tokens,
                batching.max_queued_tokens,
                num_workers,
                self.metrics.record_queue,
            )
            self.metrics.start_replica(self.queue)
            self.names: dict[str, str] = {}
            """Name of the model of each checkpoint."""

        async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
            """Loads as many models as fit before requests name them."""
            self.names = {checkpoint: name for name, checkpoint in user_config["models"].items()}
            for checkpoint in list(self.names)[:max_models_per_replica]:
                await self.get_engine(checkpoint)

        @serve.multiplexed(max_num_models_per_replica=max_models_per_replica)  # type: ignore[untyped-decorator]
        async def get_engine(self, checkpoint: str) -> RerankEngine:
            """Loads a checkpoint and ranks once.

            So no client waits for the one-time initialization, 0.4 s on two cores.
            """
            started_at = time.monotonic()
            ranker = await asyncio.to_thread(load, checkpoint, dtype=self.settings.dtype)
            await asyncio.to_thread(ranker.rank, "question", ["candidate"])
            duration_s, name = time.monotonic() - started_at, self.names.get(checkpoint, checkpoint)
            self.metrics.record_load(name, ranker.exit_layers, duration_s)
            return RerankEngine(ranker, self.settings.limits, AnswerScoring.read(checkpoint))

        async def rank(
            self, request: RerankRequest, timeout_s: float
        ) -> RerankResult | RequestError:
            """Returns the result or the error: a raised error would lose its type on the way."""
            engine = await self.get_engine(serve.get_multiplexed_model_id())
            try:
                tokenized = await asyncio.to_thread(engine.tokenize, request)
                return await self.queue.submit(tokenized, timeout_s)
            except RequestError as error:
                return error

        async def get_model_info(self) -> ModelInfo:
            """Describes the model."""
            engine: RerankEngine = await self.get_engine(serve.get_multiplexed_model_id())
            return engine.model_info

        def _rank_batch(
            self, batch: Sequence[TokenizedRequest], fill_level: float, running: int
        ) -> list[RerankResult]:
            set_num_threads(max(1, self.num_cores // running))
            started_at = time.monotonic()
            results = rank_batch(batch, self.settings.load_shedding.drop_ratio_at(fill_level))
            num_tokens = sum(tokenized.num_tokens for tokenized in batch)
            self.metrics.record_batch(num_tokens, time.monotonic() - started_at, self.queue)
            return results

    return Replica


@serve.ingress()
class Gateway:
    """Serves HTTP and sends requests to the replicas; the `RankingService` of the application.

    Args:
        ranker: Handle of the replicas.
        settings: Settings of the service.
    """

    def __init__(self, ranker: DeploymentHandle, settings: Settings) -> None:
        self.ranker, self.settings = ranker, settings
        self.models: dict[str, str] = {}
        self.model_infos: dict[str, ModelInfo] = {}
        """Description of the model of each checkpoint."""
        self.last_response_at = -math.inf
        """When a replica last responded, by the monotonic clock."""
        self.service_metrics = ServiceMetrics()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the application; Ray Serve calls it once the gateway is initialized."""
        path = self.settings.index_path
        load_encoder = partial(load_sentence_encoder, dtype=self.settings.dtype)
        index = SentenceIndex.open(path, load_encoder) if path else None
        auth_tokens = read_auth_tokens(self.settings.auth_token_file)
        return create_app(self, self.settings, auth_tokens, index)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Changes the models once replicas hold the new ones; until then the old ones rank."""
        models = ServiceConfig.model_validate({"models": user_config["models"]}).models
        if self.models:
            handles = map(self._get_handle, set(models.values()) - set(self.models.values()))
            await asyncio.gather(*(handle.get_model_info.remote() for handle in handles))
        self.models = models
        self.service_metrics.start_gateway(models)

    def _get_handle(self, checkpoint: str) -> DeploymentHandle:
        return self.ranker.options(multiplexed_model_id=checkpoint)

    async def rank(self, request: RerankRequest) -> RerankResult:
        """Ranks the candidates of a request on a replica."""
        outcome = await self._call_replica(
            self.models[request.model], "rank", request, self.settings.limits.request_timeout_s
        )
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    async def get_model_info(self, model: str) -> ModelInfo:
        """Returns the description of a model; probes a replica if none has responded lately.

        While replicas respond, with any model, they are not probed: so the health check of a busy
        service does not wait in the queue, and does not evict another model. With `min_replicas: 0`
        they are never probed, because a probe would keep an idle replica alive.
        """
        checkpoint = self.models[model]
        is_silent = time.monotonic() - self.last_response_at > PROBE_AFTER_S
        needs_probe = is_silent and self.settings.replicas.min_replicas > 0
        if checkpoint not in self.model_infos or needs_probe:
            self.model_infos[checkpoint] = await self._call_replica(checkpoint, "get_model_info")
        return self.model_infos[checkpoint]

    async def _call_replica(self, checkpoint: str, method_name: str, *args: object) -> Any:
        """Calls a method of a replica, and once more if the replica dies."""
        timeout_s = self.settings.limits.request_timeout_s
        method = getattr(self._get_handle(checkpoint), method_name)
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    result = await method.remote(*args)
                except REPLICA_DIED:
                    result = await method.remote(*args)
        except BackPressureError:
            raise overloaded_error("too many requests are queued for a replica", 1) from None
        except (TimeoutError, DeploymentUnavailableError, *REPLICA_DIED):
            raise timeout_error(timeout_s) from None
        self.last_response_at = time.monotonic()
        return result

    async def export_metrics(self) -> str:
        """Returns the metrics of all gateways."""
        return await collect_metrics()

    def record_request(self, record: RequestRecord) -> None:
        """Counts a finished request."""
        self.service_metrics.record_request(record)
