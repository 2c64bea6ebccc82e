"""The service in this process: the real application, queue and engines, tiny rankers, no Ray."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from starlette.testclient import TestClient

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.app import create_app
from as2ray.serving.batch_queue import BatchQueue
from as2ray.serving.engine import RerankEngine, rank_batch
from as2ray.serving.settings import ServiceConfig
from as2ray.serving.types import ModelInfo, RequestError, RequestRecord, RerankRequest, RerankResult


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
        )

    model_problem = None

    @property
    def models(self) -> Mapping[str, str]:
        return self.settings.models

    async def rank(self, request: RerankRequest) -> RerankResult:
        tokenized = await asyncio.to_thread(self.engines[request.model].tokenize, request)
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


@pytest.fixture(scope="session")
def cascade(checkpoint, tmp_path_factory) -> str:
    """A tiny cascade that drops half after each exit but the last."""
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 2, 3])
    ranker.drop_ratios = 0.5
    return str(save(ranker, tmp_path_factory.mktemp("served") / "cascade"))


@pytest.fixture(scope="session")
def serve(cascade):
    """A client of a service in process: `serve(tokens=(), **settings)`."""
    with ExitStack() as stack:

        def make(tokens=(), **settings) -> TestClient:
            settings = ServiceConfig.model_validate({"models": {"cascade": cascade}, **settings})
            service = InProcess(settings)
            path = settings.index_path
            index = SentenceIndex.open(path, load_sentence_encoder) if path else None
            client = TestClient(create_app(service, settings, tokens, index))
            client.service = service
            return stack.enter_context(client)  # all its requests share one event loop

        yield make


@pytest.fixture(scope="session")
def client(serve):
    """One with the defaults."""
    return serve()


@pytest.fixture
def together():
    """Calls a function so many times at once; what each returned."""

    def call(function, times: int) -> list:
        with ThreadPoolExecutor(times) as pool:
            return list(pool.map(lambda _: function(), range(times)))

    return call


@pytest.fixture(scope="session")
def address(cascade):
    """Where a service of this process listens, for clients that need a socket."""
    with listen(cascade) as address:
        yield address


@contextmanager
def listen(cascade: str, index: SentenceIndex | None = None) -> Iterator[str]:
    """Lets a service of this process listen at an address."""
    settings = ServiceConfig.model_validate({"models": {"cascade": cascade}})
    app = create_app(InProcess(settings), settings, index=index)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it listened"
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
