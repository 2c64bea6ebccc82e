"""The application on a real Ray Serve, deployed as `serve deploy` does it."""

import os
import shutil
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
def broken(cascade, tmp_path_factory) -> str:
    """The cascade with half of its weights missing, as an upload that was cut off."""
    folder = tmp_path_factory.mktemp("broken") / "cascade"
    shutil.copytree(cascade, folder)
    [weights] = folder.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    return str(folder)


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

    def deploy(
        models: dict[str, str], replicas: int = 2, args_models: dict[str, str] | None = None
    ) -> None:
        changed = [{"name": n, "user_config": {"models": models}} for n in ("ranker", "gateway")]
        application = {
            "name": NAME,
            "route_prefix": "/",
            "import_path": "as2ray.serving.deployment:build_app",
            "args": {
                "models": args_models or {"default": cascade},
                "replicas": {
                    "num_cpus": 0.3,
                    "gateway_num_cpus": 0.1,
                    "min_replicas": replicas,
                    "max_replicas": replicas,
                },
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
    body = {"question": QUESTION, "candidates": CANDIDATES, "budget_ms": 60_000}
    within = httpx.post(f"{address}/rank", json=body, timeout=60.0).json()
    assert [each["index"] for each in within["ranking"]] == [each.index for each in expected]
    assert within["budget_exceeded_ms"] == 0.0
    wrong = httpx.post(
        f"{address}/v2/rerank", json={"model": "m", "query": " ", "documents": ["a"]}
    )
    assert (wrong.status_code, set(wrong.json())) == (422, {"message"})


def ranker_names() -> set[str]:
    import ray

    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return {name for name in names if f"{NAME}#ranker#" in name}


def kill_a_ranker() -> None:
    import ray

    actor = ray.get_actor(min(ranker_names()), namespace="serve")
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def test_a_replica_that_dies_under_load_loses_no_answer(deployed):
    address, _ = deployed
    with Load(address) as asked:
        wait(lambda: len(asked.answers) > 3, "a few answers")
        kill_a_ranker()
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_models_that_cannot_be_loaded_never_replace_good_ones(
    deployed, cascade, broken, second, replicas
):
    from ray import serve

    address, deploy = deployed
    layers = [1, 2, 3]

    def info(key: str) -> object:
        return httpx.get(f"{address}/info", timeout=60).json()[key]

    def app_status() -> str:
        return serve.status().applications[NAME].status

    with Load(address, clients=2) as asked:
        deploy({"default": cascade}, replicas)  # other arguments: new replicas beside the old ones
        wait(lambda: app_status() == "RUNNING", "the new replicas run")
        wait(lambda: info("exit_layers") == layers, "the first model answers")
        deploy({"default": broken}, replicas)
        wait(lambda: info("model_problem"), "the rejection is told")
        assert "default" in info("model_problem")
        assert broken not in info("model_problem")
        before = len(asked.answers)
        wait(lambda: len(asked.answers) > before + 5, "the old model answers")
        names = ranker_names()
        if replicas == 2:  # who starts later takes the last good models
            kill_a_ranker()
            wait(lambda: len(ranker_names() - names) == 1, "another replica starts")
            wait(lambda: app_status() == "RUNNING", "it runs")
            before = len(asked.answers)
            wait(lambda: len(asked.answers) > before + 5, "it answers")
        deploy({"default": second}, replicas)
        wait(lambda: info("exit_layers") == [1, 3], "good models are taken")
        assert info("model_problem") is None
        deploy({"default": broken}, replicas, {"default": broken})
        wait(lambda: app_status() == "DEPLOY_FAILED", "the deployment fails")
        before = len(asked.answers)
        wait(lambda: len(asked.answers) > before + 5, "the old replicas answer")
        deploy({"default": cascade}, replicas)
        wait(lambda: app_status() == "RUNNING", "the good deployment runs")
    assert {answer.status_code for answer in asked.answers} == {200}
