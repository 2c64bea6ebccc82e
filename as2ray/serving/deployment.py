"""The Ray Serve deployments: gateways, which speak HTTP, and replicas, which rank.

A Serve config file names `import_path: as2ray.serving.deployment:build_app`, with the fields of
`ServiceConfig` as `args`. Each request goes to a replica that holds its model (multiplexing). The
id of a model is its checkpoint: if `user_config` changes the checkpoint of a name, the new model is
loaded while the old one still ranks.
"""

import asyncio
import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.experimental import internal_kv
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from as2ray.distributed.cluster import WORKER_ENVIRONMENT
from as2ray.errors import As2rayError, ConfigError
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.question_answering import check_encoder, resolve_scoring
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.admission import RESERVED_REQUESTS, Admission
from as2ray.serving.app import create_app
from as2ray.serving.metrics import (
    METRICS_TIMEOUT_S,
    ServiceMetrics,
    collect_metrics,
    counts_in_process,
    merge_metrics,
)
from as2ray.serving.settings import ServiceConfig, Settings, read_auth_tokens
from as2ray.serving.types import (
    ModelInfo,
    RequestError,
    RequestRecord,
    RerankRequest,
    RerankResult,
    overloaded_error,
    timeout_error,
    unavailable_error,
)

if TYPE_CHECKING:  # Only replicas load models; what builds the application and gateways do not.
    from as2ray.serving.engine import RerankEngine, TokenizedRequest

logger = logging.getLogger("ray.serve.as2ray")  # Ray Serve's own log files take its records

REPLICA_DIED = (RayActorError, ReplicaUnavailableError)
"""A replica died while it ranked a request; another replica can rank it."""

MAX_CONCURRENT_BATCHES = 2
"""Maximum number of batches that a replica ranks at the same time, each with its share of the
cores."""

MAX_PART_S = 0.25
"""Seconds that a part of a large batch takes, after which smaller requests go first."""

PING_PERIOD_S, PING_TIMEOUT_S, MAX_SILENCE_S, MIN_MISSED_PINGS = 1.0, 2.0, 5.0, 2
"""Each gateway pings a replica. Without any response for longer than the maximum, requests are
refused at once. One missed ping does not count: a gateway that had no core itself misses it."""

PROBE: Final = ("How fast does it rank?", ["A candidate of about the usual length is ranked."] * 64)
PROBE_BUDGET_MS: Final = 500
"""Question and candidates by which the speed of a ranker is measured when it is loaded."""

HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S = 1.0, 3.0
"""Ray Serve replaces a replica that fails three health checks in succession: one that hangs after 9
to 10 s. Much shorter ones replace rankers that work, on a machine without free cores."""

RANKER_SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds after which a replica that is stopped is killed. One that hangs holds its cores until
then; what it has not ranked is ranked by another one."""

DRAIN_GRACE_S = 3.0
"""Seconds in which a gateway that is not ready still accepts requests."""

KV_NAMESPACE = "as2ray"
"""Namespace of Ray's key-value store, which lives as long as the cluster."""


def build_app(config: ServiceConfig) -> serve.Application:
    """Builds the application.

    Raises:
        ConfigError: The token file cannot be read.
        SentenceIndexError: The index cannot be read, or has embeddings of another encoder than a
            model was adapted with.
    """
    # Missing files are reported here, before replicas fail on them one after the other.
    read_auth_tokens(config.auth_token_file)
    encoder = None
    if config.index_path:
        index = _open_index(config.settings, config.index_path)
        encoder = index.stored_embeddings and index.stored_embeddings.info.fingerprint
        for checkpoint in config.models.values():
            resolve_scoring(index, AnswerScoring.read(checkpoint))
    settings, replicas = config.settings, config.replicas
    shared_options = {
        "max_queued_requests": config.batching.max_queued_requests,
        "user_config": {"models": config.models},
        # Each request has a line of its own in the log files.
        "logging_config": {"encoding": "JSON", "enable_access_log": False},
        "max_surge_percent": replicas.max_surge_percent,
        "max_constructor_retry_count": 3,  # with several replicas, a broken model fails as soon
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
    }
    model_store = ModelStore(hashlib.sha256(config.model_dump_json().encode()).hexdigest())
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
        graceful_shutdown_timeout_s=RANKER_SHUTDOWN_TIMEOUT_S,
        **scaling_options,
        **shared_options,
    )
    gateway = serve.deployment(
        Gateway,
        name="gateway",
        num_replicas=replicas.num_gateways,
        ray_actor_options={"num_cpus": replicas.gateway_num_cpus},
        max_ongoing_requests=Admission(settings).max_ranking + RESERVED_REQUESTS,
        # Serve's default of 20 s would stop a gateway before its last responses are sent.
        graceful_shutdown_timeout_s=2 * config.limits.request_timeout_s,
        backpressure_config={"status_code": config.overload_status_code, "retry_after_s": 1},
        **shared_options,
    )
    rankers = ranker.bind(settings, model_store, encoder) if config.models else None
    return gateway.bind(rankers, settings, model_store)


def _check_models(models: Any) -> dict[str, str]:
    """Returns the models of a `user_config`, which nothing has checked before.

    Raises:
        ConfigError: They are none, or not as in `ServiceConfig`.
    """
    if not models:
        raise ConfigError("a service that has a ranker needs at least one model")
    return ServiceConfig.from_models(models, Settings()).models


def _describe_rejection(models: Any, error: Exception) -> str:
    """Describes why the models of a `user_config` were rejected, without paths: clients read it."""
    cause = getattr(error, "cause", error)  # Ray wraps the error of another process
    reason = cause.problem if isinstance(cause, As2rayError) else type(cause).__name__
    try:
        names = _check_models(models)
    except ConfigError:
        return f"the models were rejected: {reason}"
    for name, checkpoint in names.items():
        reason = reason.replace(checkpoint, f"the model {name}")
    return f"the models {list(names)} were rejected: {reason}"


def _open_index(settings: Settings, path: str) -> SentenceIndex:
    from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

    return SentenceIndex.open(path, partial(load_sentence_encoder, dtype=settings.dtype))


@dataclass(frozen=True)
class ModelStore:
    """What is known of models, for replicas that start later, on any node."""

    config_id: str
    """Hash of the application's arguments. Others start without what is known here, and fail on
    models that cannot be loaded."""

    def save_good(self, models: Mapping[str, str]) -> None:
        """Saves models that a replica has loaded."""
        self._put("good", models)

    def save_rejected(self, models: Any, problem: str) -> None:
        """Saves models that a replica could not load, and why."""
        self._put("rejected", {"models": models, "problem": problem})

    def replace_rejected(self, models: Any) -> tuple[Any, str | None]:
        """Returns the models to use instead of these, and why if they are other ones."""
        rejected, good = self._get("rejected"), self._get("good")
        if good and rejected and rejected["models"] == models:
            return good, rejected["problem"]
        return models, None

    def _put(self, key: str, value: object) -> None:
        name = f"{self.config_id}/{key}"
        internal_kv._internal_kv_put(name, json.dumps(value), namespace=KV_NAMESPACE)

    def _get(self, key: str) -> Any:
        value = internal_kv._internal_kv_get(f"{self.config_id}/{key}", namespace=KV_NAMESPACE)
        return json.loads(value) if value else None


def _create_replica_class(max_models_per_replica: int) -> type:
    """Creates the class of replicas that hold up to `max_models_per_replica` models.

    `serve.multiplexed` needs the number when the class is defined.
    """

    class Replica:
        """Ranks requests in batches, with one queue for all models.

        Args:
            settings: Settings of the service.
            model_store: What is known of models.
            encoder: Fingerprint of the encoder of the index; None without embeddings.
        """

        def __init__(
            self, settings: Settings, model_store: ModelStore, encoder: str | None = None
        ) -> None:
            from as2ray.serving.batch_queue import BatchQueue

            self.settings, batching, self.model_store = settings, settings.batching, model_store
            self.encoder, self.num_cores = encoder, math.ceil(settings.replicas.num_cpus)
            num_workers = min(MAX_CONCURRENT_BATCHES, self.num_cores)
            self.metrics = ServiceMetrics()
            self.queue = BatchQueue(
                self._rank_batch,
                batching.max_batch_tokens,
                batching.max_queued_tokens,
                batching.max_queue_s,
                num_workers,
                self.metrics.record_queue,
                self._record_batch,
            )
            self.metrics.start_replica(self.queue)
            self.names: dict[str, str] = {}
            """Name of the model of each checkpoint."""
            self.new_engines: dict[str, asyncio.Task[RerankEngine]] = {}
            """Engines that are loaded beside those that rank."""
            self.probed_engine: RerankEngine | None = None
            # A thread of its own: a health check never waits for a batch.
            self.probe_executor = ThreadPoolExecutor(1, "probe")

        async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
            """Loads as many models as fit before requests name them.

            If one cannot be loaded, the models before it stay: raising would make Ray Serve stop a
            replica that ranks. A replica without models raises, unless others had models before.
            """
            models: Any = user_config.get("models")
            if not self.names:  # for others, they may have been repaired
                models, _ = self.model_store.replace_rejected(models)
            try:
                names = {checkpoint: name for name, checkpoint in _check_models(models).items()}
                checkpoints = list(names)[:max_models_per_replica]
                for checkpoint in checkpoints:
                    if checkpoint not in self.names:
                        await self._load_once(checkpoint, names[checkpoint])
            except Exception as error:
                self.new_engines.clear()
                self.metrics.record_rejected_models()
                if not self.names:
                    raise
                problem = _describe_rejection(models, error)
                self.model_store.save_rejected(models, problem)
                logger.error("%s; the models before them rank", problem)
                return
            self.names = names
            for checkpoint in checkpoints:
                self.probed_engine = await self.get_engine(checkpoint)
            self.model_store.save_good(models)

        async def check_health(self) -> None:
            """Scores a pair on the device; Ray Serve calls it, and has a timeout."""
            if self.probed_engine is not None:
                rank = self.probed_engine.ranker.rank
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self.probe_executor, rank, "question", ["candidate"])

        async def ping(self) -> None:
            """Responds."""

        async def export_metrics(self) -> str:
            """Returns the metrics that are counted in this process."""
            return self.metrics.export()

        @serve.multiplexed(max_num_models_per_replica=max_models_per_replica)  # type: ignore[untyped-decorator]
        async def get_engine(self, checkpoint: str) -> "RerankEngine":
            """Loads a checkpoint, unless that has been done."""
            try:
                return await self._load_once(checkpoint, self.names.get(checkpoint, checkpoint))
            finally:
                # A client that left leaves the load to the next one, which would start another.
                if (load := self.new_engines.get(checkpoint)) and load.done():
                    del self.new_engines[checkpoint]

        async def _load_once(self, checkpoint: str, name: str) -> "RerankEngine":
            if checkpoint not in self.new_engines:
                self.new_engines[checkpoint] = asyncio.create_task(self._load(checkpoint, name))
            # A client that disconnects does not keep others from the model.
            return await asyncio.shield(self.new_engines[checkpoint])

        async def _load(self, checkpoint: str, name: str) -> "RerankEngine":
            """Loads a checkpoint and ranks once.

            So no client waits for the one-time initialization, 0.4 s on two cores.

            Raises:
                SentenceIndexError: `/ask` could not use it with the index of the service.
            """
            from as2ray.checkpoints.loading import load
            from as2ray.serving.engine import RerankEngine

            started_at = time.monotonic()
            scoring = AnswerScoring.read(checkpoint)
            if self.settings.index_path is not None:
                check_encoder(scoring, self.encoder)
            ranker = await asyncio.to_thread(load, checkpoint, dtype=self.settings.dtype)
            await asyncio.to_thread(ranker.rank, "question", ["candidate"])
            if ranker.keeps_budget:
                await asyncio.to_thread(ranker.rank, *PROBE, budget_ms=PROBE_BUDGET_MS)
            self.metrics.record_load(name, ranker.exit_layers, time.monotonic() - started_at)
            return RerankEngine(ranker, self.settings.limits, scoring)

        async def rank(
            self, request: RerankRequest, timeout_s: float
        ) -> RerankResult | RequestError:
            """Returns the result or the error: a raised error would lose its type on the way."""
            engine = await self.get_engine(serve.get_multiplexed_model_id())
            try:
                tokenized = await engine.tokenize_in_thread(request)
                return await self.queue.submit(tokenized, timeout_s)
            except RequestError as error:
                return error

        async def get_model_info(self) -> ModelInfo:
            """Describes the model."""
            engine: RerankEngine = await self.get_engine(serve.get_multiplexed_model_id())
            return engine.model_info

        def _rank_batch(
            self, batch: Sequence["TokenizedRequest"], fill_level: float, running: int
        ) -> list[RerankResult]:
            from as2ray.models.encoder.cpu_parallel import set_num_threads
            from as2ray.serving.engine import rank_batch

            set_num_threads(max(1, self.num_cores // running))
            rate = self.queue.tokens_per_second
            for engine in {tokenized.engine for tokenized in batch}:
                if rate is not None and engine.ranker.device.type == "cpu":
                    # A part of a batch is ranked by one core.
                    part_tokens = round(MAX_PART_S * rate / self.num_cores)
                    engine.ranker.max_batch_tokens = min(max(part_tokens, 2_048), 8_192)
            return rank_batch(batch, self.settings.load_shedding.drop_ratio_at(fill_level))

        def _record_batch(self, num_tokens: int, duration_s: float) -> None:
            self.metrics.record_batch(num_tokens, duration_s, self.queue)

    return Replica


@serve.ingress()
class Gateway:
    """Serves HTTP and sends requests to the replicas; the `RankingService` of the application.

    Args:
        ranker: Handle of the replicas; None without models.
        settings: Settings of the service.
        model_store: What is known of models.
    """

    def __init__(
        self, ranker: DeploymentHandle | None, settings: Settings, model_store: ModelStore
    ) -> None:
        if ranker is not None:
            # The given handle has the defaults of the process that built it. If it sent tasks while
            # requests arrive by gRPC, Serve would not cancel those whose clients left.
            ranker = serve.get_deployment_handle(ranker.deployment_name, ranker.app_name)
        self.ranker, self.settings, self.model_store = ranker, settings, model_store
        self.admission = Admission(settings)
        self.models: dict[str, str] = {}
        self.model_problem: str | None = None
        self.model_infos: dict[str, ModelInfo] = {}
        """Description of the model of each checkpoint."""
        self.last_response_at = -math.inf
        """When a replica last responded, by the monotonic clock."""
        self.num_missed_pings = 0
        """Pings since then without a response."""
        self.ping_task: asyncio.Task[None] | None = None
        self.service_metrics = ServiceMetrics()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the application; Ray Serve calls it once the gateway is initialized."""
        path = self.settings.index_path
        index = _open_index(self.settings, path) if path else None
        auth_tokens = read_auth_tokens(self.settings.auth_token_file)
        return create_app(self, self.settings, auth_tokens, index, self.admission)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Changes the models once replicas hold the new ones; until then the old ones rank.

        If replicas cannot load them, the old ones stay, and `/info` says why. A new gateway raises.
        """
        if self.ranker is None:  # an application of other arguments has models
            self.service_metrics.start_gateway(())
            return
        models, problem = user_config.get("models"), None
        if not self.models:
            models, problem = self.model_store.replace_rejected(models)
        try:
            models = _check_models(models)
            if not self.models:
                await self._wait_for_rankers()
            handles = map(self._get_handle, set(models.values()) - set(self.models.values()))
            await asyncio.gather(*(handle.get_model_info.remote() for handle in handles))
        except Exception as error:
            if not self.models:  # otherwise it would replace a gateway whose models rank
                raise
            # None if no replica has stored it yet.
            _, problem = self.model_store.replace_rejected(models)
            self.model_problem = problem or _describe_rejection(models, error)
            logger.error("%s; the models before them rank", self.model_problem)
            return
        self._note_response()
        self.models, self.model_problem = models, problem
        self.service_metrics.start_gateway(models)
        if self.ping_task is None and self.settings.replicas.min_replicas > 0:
            self.ping_task = asyncio.create_task(self._ping_rankers())

    async def _wait_for_rankers(self) -> None:
        """Waits until a replica responds.

        Only a new call fails once no replica could start; one that waits already does so for ever.
        """
        while self.ranker is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await self.ranker.ping.remote()
                    return

    async def _ping_rankers(self) -> None:
        """Notes whether replicas respond while no request asks them anything."""
        while self.ranker is not None:
            try:
                async with asyncio.timeout(PING_TIMEOUT_S):
                    await self.ranker.ping.remote()
            except Exception:
                self.num_missed_pings += 1
            else:
                self._note_response()
            await asyncio.sleep(PING_PERIOD_S)

    def _note_response(self) -> None:
        self.last_response_at, self.num_missed_pings = time.monotonic(), 0

    def check_rankers(self) -> None:
        """Checks that a replica has responded lately; see `RankingService`.

        With `min_replicas: 0` there may be none, and a request starts one.
        """
        silence_s = time.monotonic() - self.last_response_at
        needs_response = self.ranker is not None and self.settings.replicas.min_replicas > 0
        is_starting = math.isinf(silence_s)
        is_silent = silence_s > MAX_SILENCE_S and self.num_missed_pings >= MIN_MISSED_PINGS
        if needs_response and (is_starting or is_silent):
            reason = "it is starting" if is_starting else f"for {silence_s:.0f} s; it is restarted"
            raise unavailable_error("no ranker responds", reason)

    async def drain(self) -> None:
        """Is no longer ready; still accepts what the proxies are sending, then nothing more."""
        self.admission.is_draining = True
        await asyncio.sleep(DRAIN_GRACE_S)
        self.admission.is_closed = True

    async def count_requests(self) -> tuple[int, int]:
        """Returns the numbers of requests without a complete response, and of all so far."""
        return self.admission.num_ongoing, self.admission.num_received

    async def export_own_metrics(self) -> str:
        """Returns the metrics that are counted in this process."""
        return self.service_metrics.export()

    def _get_handle(self, checkpoint: str) -> DeploymentHandle:
        if self.ranker is None:
            raise unavailable_error("no ranker responds", "none is served")
        return self.ranker.options(multiplexed_model_id=checkpoint)

    async def rank(self, request: RerankRequest) -> RerankResult:
        """Ranks the candidates of a request on a replica."""
        if request.budget is not None:
            request = replace(request, budget=request.budget.sent_now())
        checkpoint = request.checkpoint or self.models[request.model]
        outcome = await self._call_replica(
            checkpoint, "rank", request, self.settings.limits.request_timeout_s
        )
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    async def get_model_info(self, model: str) -> ModelInfo:
        """Returns the description of a model; asks a replica once."""
        checkpoint = self.models[model]
        if checkpoint not in self.model_infos:
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
        except TimeoutError:
            raise timeout_error(timeout_s) from None
        except (DeploymentUnavailableError, *REPLICA_DIED):
            raise unavailable_error("no ranker responds", "it has ended and is restarted") from None
        self._note_response()
        return result

    async def export_metrics(self) -> str:
        """Returns the metrics of all gateways and replicas."""
        if not counts_in_process():
            return await collect_metrics()
        calls = [] if self.ranker is None else [self.ranker.broadcast("export_metrics")]
        if self.settings.replicas.num_gateways > 1:
            context = serve.get_replica_context()
            gateways = serve.get_deployment_handle(context.deployment, context.app_name)
            calls.append(gateways.broadcast("export_own_metrics"))
        texts = [self.service_metrics.export()]
        for call in calls:
            with suppress(Exception):  # no replica lives
                options = {"timeout_s": METRICS_TIMEOUT_S, "return_exceptions": True}
                texts += await call.results_async(**options)
        return merge_metrics(text for text in texts if isinstance(text, str))

    def record_request(self, record: RequestRecord) -> None:
        """Counts a finished request."""
        self.service_metrics.record_request(record)
