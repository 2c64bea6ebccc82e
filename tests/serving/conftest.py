"""The service in process: the real web, line, desks and tiny rankers, without Ray."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import uvicorn
from starlette.testclient import TestClient

from as2ray.checkpoint import load, save, start
from as2ray.retrieval.index import SentenceIndex
from as2ray.serving.asked import Answer, Asked
from as2ray.serving.desk import Desk, rank_together
from as2ray.serving.line import Line
from as2ray.serving.service import Facts, Seen
from as2ray.serving.settings import Served
from as2ray.serving.web import app_of


class InProcess:
    """Desks and a line in this process."""

    def __init__(self, settings: Served) -> None:
        self.settings = settings
        self.seen: list[Seen] = []
        self.desks = {
            name: Desk(load(path, device="cpu"), settings.limits)
            for name, path in settings.models.items()
        }
        batches = settings.batches
        self.line = Line(
            lambda batch, fullness, _: rank_together(batch, batches.relief(fullness)),
            batches.tokens,
            batches.waiting_tokens,
        )

    @property
    def models(self) -> Mapping[str, str]:
        return self.settings.models

    async def rank(self, asked: Asked, model: str) -> Answer:
        read = await asyncio.to_thread(self.desks[model].read, replace(asked, model=model))
        return await self.line.answer(read, self.settings.limits.seconds)

    async def facts(self, model: str) -> Facts:
        return self.desks[model].facts

    async def metrics(self) -> str:
        return f"as2ray_requests {len(self.seen)}\n"

    def observe(self, seen: Seen) -> None:
        self.seen.append(seen)


@pytest.fixture(scope="session")
def cascade(checkpoint, tmp_path_factory) -> str:
    """A tiny cascade that drops half after each exit but the last."""
    made = start(checkpoint("bert", None), max_length=60, exits=[1, 2, 3])
    made.drop = 0.5
    return str(save(made, tmp_path_factory.mktemp("served") / "cascade"))


@pytest.fixture(scope="session")
def serve(cascade):
    """A client of a service in process: `serve(tokens=(), **settings)`."""
    with ExitStack() as stack:

        def make(tokens=(), **settings) -> TestClient:
            settings = Served.model_validate({"models": {"cascade": cascade}, **settings})
            service = InProcess(settings)
            opened = SentenceIndex.open(settings.index) if settings.index else None
            client = TestClient(app_of(service, settings, tokens, opened))
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
    settings = Served.model_validate({"models": {"cascade": cascade}})
    config = uvicorn.Config(
        app_of(InProcess(settings), settings), host="127.0.0.1", port=0, log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it listened"
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
