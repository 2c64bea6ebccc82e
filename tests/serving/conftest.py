"""The service in this process: the real application, queue and engines, tiny rankers, no Ray."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from served import TEXT, InProcess, listen
from starlette.testclient import TestClient

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.retrieval.index_writer import write_index
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.serving.app import create_app
from as2ray.serving.engine import RerankEngine
from as2ray.serving.settings import Limits, ServiceConfig


@pytest.fixture(scope="session")
def cascade(checkpoint, tmp_path_factory) -> str:
    """A tiny cascade that drops half after each exit but the last."""
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 2, 3])
    ranker.drop_ratios = 0.5
    return str(save(ranker, tmp_path_factory.mktemp("served") / "cascade"))


@pytest.fixture(scope="module")
def engine(cascade) -> RerankEngine:
    """An engine of that cascade."""
    return RerankEngine(load(cascade, device="cpu", dtype="fp32"), Limits())


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
def index(tmp_path_factory) -> str:
    """An index of one document, without embeddings."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "notes").mkdir()
    (folder / "notes" / "one.txt").write_text(TEXT)
    write_index(folder / "notes", folder / "index")
    return str(folder / "index")


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
