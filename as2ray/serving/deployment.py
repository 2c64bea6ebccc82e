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

from as2ray.checkpoint import load
from as2ray.distributed.cluster import WORKER_ENVIRONMENT
from as2ray.models.lanes import use_cores
from as2ray.retrieval.index import SentenceIndex
from as2ray.serving.asked import Answer, Asked, Refused, too_late
from as2ray.serving.desk import Desk, Read, rank_together
from as2ray.serving.line import Line
from as2ray.serving.observed import Observed, exported
from as2ray.serving.service import Facts, Seen
from as2ray.serving.settings import Replicas, Served, Settings, tokens_of
from as2ray.serving.web import app_of

GONE = (RayActorError, ReplicaUnavailableError)
"""A replica died with a question in hand; another can rank it as well."""

SIDE_BY_SIDE = 2
"""Most batches that a replica ranks at a time, each with its part of the cores."""

HEARD = 10.0
"""Seconds for which an answer shows that replicas live; later one is asked."""

PATHS = (
    *("/", "/ask", "/rank", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/info", "/health", "/metrics"),
)
"""That metrics tell apart."""


def build(args: Served) -> serve.Application:
    """The application.

    Args:
        args: All that an operator decides.
    """
    # What is not there is told here, not by a dying replica.
    tokens_of(args.token_file)
    if args.index:
        SentenceIndex.open(args.index)
    settings, models = args.settings, {"models": args.models}
    ranker = serve.deployment(_replica(settings.models_loaded), name="ranker").options(
        ray_actor_options={
            "num_cpus": args.replicas.cpus,
            "num_gpus": args.replicas.gpus,
            "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
        },
        max_ongoing_requests=args.batches.requests,
        max_queued_requests=args.batches.queued,
        graceful_shutdown_timeout_s=2 * args.limits.seconds,
        user_config=models,
        **_count(args.replicas),
    )
    gateway = serve.deployment(Gateway, name="gateway").options(
        num_replicas=args.replicas.gateways,
        ray_actor_options={"num_cpus": args.replicas.gateway_cpus},
        max_ongoing_requests=args.batches.requests * args.replicas.most + args.batches.queued,
        max_queued_requests=args.batches.queued,
        # Serve's own 20 s would end a replica that goes before its last answers are given.
        graceful_shutdown_timeout_s=2 * args.limits.seconds,
        backpressure_config={"status_code": args.refusal, "retry_after_s": 1},
        user_config=models,
    )
    return gateway.bind(ranker.bind(settings), settings)


def _count(replicas: Replicas) -> dict[str, Any]:
    if replicas.least == replicas.most:
        return {"num_replicas": replicas.most}
    return {
        "autoscaling_config": {
            "min_replicas": replicas.least,
            "max_replicas": replicas.most,
            "target_ongoing_requests": replicas.busy,
        }
    }


def _replica(models_loaded: int) -> type:
    """The class of replicas that hold so many models."""

    class Replica:
        """Rankers behind one line."""

        def __init__(self, settings: Settings) -> None:
            self.cores = math.ceil(settings.replicas.cpus)
            self.settings, batches = settings, settings.batches
            self.line = Line(
                self._rank, batches.tokens, batches.waiting_tokens, min(SIDE_BY_SIDE, self.cores)
            )

        async def reconfigure(self, config: Mapping[str, Any]) -> None:
            """Loads models before they are asked for, as many as there is room for."""
            for checkpoint in list(config["models"].values())[:models_loaded]:
                await self.desk(checkpoint)

        @serve.multiplexed(max_num_models_per_replica=models_loaded)  # type: ignore[untyped-decorator]
        async def desk(self, checkpoint: str) -> Desk:
            """The desk of a checkpoint that has ranked once, so that no client waits for what the
            first ranking makes: 0.4 s on two cores."""
            ranker = await asyncio.to_thread(load, checkpoint, precision=self.settings.precision)
            await asyncio.to_thread(ranker.rank, "question", ["candidate"])
            return Desk(ranker, self.settings.limits)

        async def rank(self, asked: Asked, within: float) -> Answer | Refused:
            """The answer, or why there is none: as a value, an error would lose its type."""
            desk = await self.desk(serve.get_multiplexed_model_id())
            try:
                read = await asyncio.to_thread(desk.read, asked)
                return await self.line.answer(read, within)
            except Refused as refused:
                return refused

        async def facts(self) -> Facts:
            """What the model is."""
            desk: Desk = await self.desk(serve.get_multiplexed_model_id())
            return desk.facts

        def _rank(self, batch: Sequence[Read], fullness: float, at_work: int) -> list[Answer]:
            use_cores(max(1, self.cores // at_work))
            return rank_together(batch, self.settings.batches.relief(fullness))

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
        self.known: dict[str, Facts] = {}
        """Of checkpoints."""
        self.heard = -math.inf
        """When a replica last answered, in seconds of the monotonic clock."""
        self.observed = Observed()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for it once the gateway is made."""
        where = self.settings.index
        index = SentenceIndex.open(where) if where else None
        return app_of(self, self.settings, tokens_of(self.settings.token_file), index)

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Other models answer, each as soon as a replica holds it; until then the old ones do."""
        models = Served.model_validate({"models": config["models"]}).models
        if self.models:
            new = set(models.values()) - set(self.models.values())
            await asyncio.gather(*(self._of(checkpoint).facts.remote() for checkpoint in new))
        self.models = models

    def _of(self, checkpoint: str) -> DeploymentHandle:
        return self.ranker.options(multiplexed_model_id=checkpoint)

    async def rank(self, asked: Asked, model: str) -> Answer:
        """The answer of a model."""
        asked, within = replace(asked, model=model), self.settings.limits.seconds
        found = await self._told(self.models[model], "rank", asked, within)
        if isinstance(found, Refused):
            raise found
        return found  # type: ignore[no-any-return]

    async def facts(self, model: str) -> Facts:
        """What a model is, from a replica that lives.

        While replicas answer, with any model, they are not asked, so that the health of a busy
        service does not wait in line, nor load a model in another's place; nor where none need
        live, as a probe would keep one from ending.
        """
        checkpoint = self.models[model]
        silent = time.monotonic() - self.heard > HEARD
        if checkpoint not in self.known or (silent and self.settings.replicas.least):
            self.known[checkpoint] = await self._told(checkpoint, "facts")
        return self.known[checkpoint]

    async def _told(self, checkpoint: str, what: str, *given: object) -> Any:
        """What a replica says; asked again once if it dies."""
        method, within = getattr(self._of(checkpoint), what), self.settings.limits.seconds
        try:
            async with asyncio.timeout(within):
                try:
                    found = await method.remote(*given)
                except GONE:
                    found = await method.remote(*given)
        except BackPressureError:
            raise _full() from None
        except (TimeoutError, DeploymentUnavailableError, *GONE):
            raise too_late(within) from None
        self.heard = time.monotonic()
        return found

    async def metrics(self) -> str:
        """Of all gateways."""
        return await exported()

    def observe(self, seen: Seen) -> None:
        """Counts a request."""
        self.observed.observe(seen, PATHS)


def _full() -> Refused:
    return Refused(
        "overloaded",
        "too many requests wait for a replica",
        expected="a service less busy",
        mend="ask again in 1 s",
        retry_after=1,
    )
