"""The application on a real Ray Serve, deployed as `serve deploy` does it."""

import os
import signal
import socket
import threading
import time

import httpx
import pytest
from served import CANDIDATES, QUESTION

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save

pytestmark = pytest.mark.slow

NAME = "as2ray"


@pytest.fixture(scope="module")
def second(checkpoint, tmp_path_factory) -> str:
    """Another cascade, with other exits, so that an answer tells whose it is."""
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 3])
    ranker.drop_ratios = 0.5
    return str(save(ranker, tmp_path_factory.mktemp("second") / "cascade"))


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def deployed(ray_local, cascade, port):
    """The address of the application, and what deploys other models."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    def deploy(models: dict[str, str]) -> None:
        changed = [{"name": n, "user_config": {"models": models}} for n in ("ranker", "gateway")]
        application = {
            "name": NAME,
            "route_prefix": "/",
            "import_path": "as2ray.serving.deployment:build_app",
            "args": {
                "models": {"default": cascade},
                "replicas": {"num_cpus": 0.5, "min_replicas": 2, "max_replicas": 2},
                "limits": {"request_timeout_s": 60},
            },
            "deployments": changed,
        }
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))

    serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": 120})
    deploy({"default": cascade})
    address = f"http://127.0.0.1:{port}"
    wait(lambda: status(address) == 200, "the application is up")
    yield address, deploy
    serve.shutdown()


def status(address: str) -> int:
    try:
        return httpx.get(f"{address}/health", timeout=10).status_code
    except httpx.HTTPError:
        return 0


def wait(done, what: str, seconds: float = 450.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"after {seconds:g} s not yet: {what}"
        time.sleep(1)


def rank(address: str) -> httpx.Response:
    asked = {"question": QUESTION, "candidates": CANDIDATES}
    return httpx.post(f"{address}/rank", json=asked, timeout=120)


class Load:
    """Clients that ask one question after the other; every answer is kept."""

    def __init__(self, address: str, clients: int = 3) -> None:
        self.address, self.answers, self.ended = address, [], threading.Event()
        self.threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def _ask(self) -> None:
        while not self.ended.is_set():
            self.answers.append(rank(self.address))

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


def test_rankings_over_serve_are_the_ranker_s(deployed, cascade):
    address, _ = deployed
    expected = load(cascade, device="cpu").rank(QUESTION, CANDIDATES)
    answer = rank(address)
    found = answer.json()
    assert [one["index"] for one in found["ranking"]] == [one.index for one in expected]
    assert found["model"] == "default"
    assert answer.headers["x-drop-ratios"] == "0.5,0.5"
    assert httpx.get(f"{address}/info").json()["exit_layers"] == [1, 2, 3]
    assert "as2ray" in httpx.get(f"{address}/").text
    wrong = httpx.post(
        f"{address}/v2/rerank", json={"model": "m", "query": " ", "documents": ["a"]}
    )
    assert (wrong.status_code, set(wrong.json())) == (422, {"message"})


def test_a_replica_that_dies_under_load_loses_no_answer(deployed):
    import ray

    address, _ = deployed
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    [victim, *_] = [name for name in names if f"{NAME}#ranker#" in name]
    actor = ray.get_actor(victim, namespace="serve")
    with Load(address) as asked:
        wait(lambda: len(asked.answers) > 3, "a few answers")
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        before = len(asked.answers)
        wait(lambda: len(asked.answers) > before + 20, "answers after the death")
    assert {answer.status_code for answer in asked.answers} == {200}
    best = {tuple(one["index"] for one in answer.json()["ranking"]) for answer in asked.answers}
    assert len(best) == 1


def test_models_change_under_load_without_a_failed_request(deployed, second):
    address, deploy = deployed
    with Load(address, clients=2) as asked:
        wait(lambda: len(asked.answers) > 3, "a few answers")
        deploy({"default": second})
        wait(lambda: asked.answers[-1].json().get("exit_layers") == [1, 3], "the new model answers")
    assert {answer.status_code for answer in asked.answers} == {200}
    assert {tuple(answer.json()["exit_layers"]) for answer in asked.answers} == {(1, 2, 3), (1, 3)}
