"""The service in this process: the real application, queue and engines; and what tests ask it."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from starlette.types import Receive, Scope, Send

from as2ray.checkpoints.loading import load
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.app import create_app
from as2ray.serving.batch_queue import BatchQueue
from as2ray.serving.engine import RerankEngine, rank_batch
from as2ray.serving.proxy import ProxyMiddleware
from as2ray.serving.settings import ServiceConfig
from as2ray.serving.types import (
    ModelInfo,
    RequestError,
    RequestRecord,
    RerankRequest,
    RerankResult,
    TimeBudget,
)

QUESTION = "What is kovarin?"
TEXT = """Kovarin ne badesso. Muri kovarin lala.

Quintol ba ne. Zelimut lala ne muri.
"""
CANDIDATES = ["Badesso.", "Kovarin ne kovarin.", "Lala muri.", "Muri.", "Quintol ba.", "Zelimut."]


def with_budget(budget_ms: float, question: str = QUESTION, candidates=CANDIDATES, **changes):
    """Returns a request that has arrived now."""
    budget = TimeBudget(budget_ms, time.monotonic(), **changes)
    return RerankRequest(question, candidates, "m", budget=budget)


class InProcess:
    """Engines and a queue in this process."""

    def __init__(self, settings: ServiceConfig) -> None:
        self.settings = settings
        self.records: list[RequestRecord] = []
        self.problem: RequestError | None = None
        self.engines = {
            name: RerankEngine(load(path, device="cpu"), settings.limits, AnswerScoring.read(path))
            for name, path in settings.models.items()
        }
        self.queue = BatchQueue(
            lambda batch, fill_level, _: rank_batch(
                batch, settings.load_shedding.drop_ratio_at(fill_level)
            ),
            settings.batching.max_batch_tokens,
            settings.batching.max_queued_tokens,
            settings.batching.max_queue_s,
        )

    model_problem = None

    @property
    def models(self) -> Mapping[str, str]:
        return self.settings.models

    async def rank(self, request: RerankRequest) -> RerankResult:
        tokenized = await self.engines[request.model].tokenize_in_thread(request)
        return await self.queue.submit(tokenized, self.settings.limits.request_timeout_s)

    async def get_model_info(self, model: str) -> ModelInfo:
        return self.engines[model].model_info

    def check_rankers(self) -> None:
        if self.problem is not None:
            raise self.problem

    async def export_metrics(self) -> str:
        return f"as2ray_requests {len(self.records)}\n"

    def record_request(self, record: RequestRecord) -> None:
        self.records.append(record)


@contextmanager
def listen(cascade: str | None, index: SentenceIndex | None = None) -> Iterator[str]:
    """Lets a service of this process listen at an address."""
    models = {"cascade": cascade} if cascade else {}
    path = str(index.folder) if index else None
    settings = ServiceConfig.model_validate({"models": models, "index_path": path})
    service = ProxyMiddleware(create_app(InProcess(settings), settings, index=index))

    # uvicorn calls what it gets without arguments, which must fail, also if methods are wrapped as
    # in tests/mutants.py.
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await service(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it listened"
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:  # Python waits for the thread, also after a test that fails.
        server.should_exit = True
        thread.join()
