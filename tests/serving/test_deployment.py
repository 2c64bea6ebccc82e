"""The application on a real Ray Serve, deployed as `serve deploy` does it."""

import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from served import CANDIDATES, QUESTION
from test_metrics import OF_GPUS, PLOTTED

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
        models: dict[str, str], args_models: dict[str, str] | None = None, num_replicas: int = 2
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
                    "min_replicas": num_replicas,
                    "max_replicas": num_replicas,
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


def wait(done, what: str, seconds: float = 900.0) -> None:
    """Waits; on a busy machine a process of Ray Serve takes minutes to start."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"after {seconds:g} s not yet: {what}"
        time.sleep(0.2)


class Load:
    """Two clients that ask one question after the other; every answer is kept."""

    def __init__(self, address: str) -> None:
        self.answers, self.ended = [], threading.Event()
        self.client = httpx.Client(base_url=address, timeout=120)
        self.threads = [threading.Thread(target=self._ask) for _ in range(2)]

    def rank(self) -> httpx.Response:
        return self.client.post("/rank", json={"question": QUESTION, "candidates": CANDIDATES})

    def info(self, key: str) -> object:
        return self.client.get("/info").json()[key]

    def wait_for_answers(self, what: str) -> None:
        before = len(self.answers)
        wait(lambda: len(self.answers) > before + 5, what)

    def _ask(self) -> None:
        while not self.ended.wait(0.1):  # without a pause, two clients take a whole core
            self.answers.append(self.rank())

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()
        self.client.close()


def count_starting() -> int:
    """Number of replicas that start, of all deployments."""
    from ray import serve

    deployments = serve.status().applications[NAME].deployments.values()
    return sum(each.replica_states.get("STARTING", 0) for each in deployments)


def app_status() -> str:
    from ray import serve

    return serve.status().applications[NAME].status


def ranker_names() -> set[str]:
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return {name for name in names if f"{NAME}#ranker#" in name}


def kill_a_ranker() -> None:
    import ray

    actor = ray.get_actor(min(ranker_names()), namespace="serve")
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def read_until(address: str, is_complete: Callable[[str], bool], seconds: float = 900.0) -> str:
    """Our samples of an endpoint, once they are complete: Ray collects them every few seconds."""
    until = time.monotonic() + seconds
    while True:
        lines = httpx.get(f"{address}/metrics", timeout=300).text.splitlines(keepends=True)
        ours = (line for line in lines if f'application="{NAME}"' in line)
        text = "".join([*ours, *(line for line in lines if "application=" not in line)])
        if is_complete(text):
            return text
        assert time.monotonic() < until, text
        time.sleep(1)


def values(text: str, name: str, **labels: str) -> float:
    """Sum of the samples of a metric with these labels."""
    lines = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.M)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for given, value in lines if all(one in given for one in wanted))


# First: metrics are there before anybody has asked anything.


def test_both_endpoints_have_every_plotted_metric_before_the_first_request(deployed):
    import ray

    address, _ = deployed
    [node] = [node for node in ray.nodes() if node["Alive"]]
    agent = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"

    def is_complete(text: str) -> bool:
        missing = PLOTTED - OF_GPUS - set(re.findall(r"^(\w+)(?=[{ ])", text, re.M))
        healthy = values(text, "ray_serve_deployment_replica_healthy", deployment="ranker")
        return not missing and healthy == 2

    for endpoint in (address, agent):  # the service's first: to ask it is a request, too
        text = read_until(endpoint, is_complete)
        for name in ("tokens_total", "candidates_exited_total", "batches_total", "queue_fill"):
            assert values(text, f"ray_as2ray_{name}") == pytest.approx(0)
        assert values(text, "ray_as2ray_rejected_total", code="overloaded") == pytest.approx(0)


def test_a_ranking_is_counted_where_its_candidates_left(deployed):
    address, _ = deployed
    request = {"question": QUESTION, "candidates": CANDIDATES}
    scored = httpx.post(f"{address}/rank", json=request, timeout=3000).json()["num_scored"]
    assert httpx.post(f"{address}/rank", json={}, timeout=3000).status_code == 422

    def is_complete(text: str) -> bool:
        rejected = values(text, "ray_as2ray_rejected_total", code="invalid_request")
        return rejected >= 1 and values(text, "ray_as2ray_batches_total") >= 1

    text = read_until(address, is_complete)
    exited = [
        round(values(text, "ray_as2ray_candidates_exited_total", exit_layer=layer))
        for layer in "123"
    ]
    assert exited == [scored[0] - scored[1], scored[1] - scored[2], scored[2]]
    assert sum(exited) == len(CANDIDATES)
    assert values(text, "ray_as2ray_batches_total") == pytest.approx(1)
    assert 0 < values(text, "ray_as2ray_batch_fill_total") < 1
    assert 0 < values(text, "ray_as2ray_busy_seconds_total") < 60
    for path, status, count in (("/rank", "200", 1), ("/rank", "422", 1), ("/ask", "200", 0)):
        counts = values(text, "ray_as2ray_requests_total", path=path, status=status)
        assert counts == pytest.approx(count)


def test_rankings_over_serve_are_the_ranker_s(deployed, cascade):
    address, _ = deployed
    expected = load(cascade, device="cpu").rank(QUESTION, CANDIDATES)
    with httpx.Client(base_url=address, timeout=120) as client:
        answer = client.post("/rank", json={"question": QUESTION, "candidates": CANDIDATES})
        body = answer.json()
        assert [ranked["index"] for ranked in body["ranking"]] == [r.index for r in expected]
        assert body["model"] == "default"
        assert answer.headers["x-drop-ratios"] == "0.5,0.5"
        assert client.get("/info").json()["exit_layers"] == [1, 2, 3]
        assert "as2ray" in client.get("/").text
        request = {"question": QUESTION, "candidates": CANDIDATES, "budget_ms": 60_000}
        within = client.post("/rank", json=request).json()
        assert [ranked["index"] for ranked in within["ranking"]] == [r.index for r in expected]
        assert within["budget_exceeded_ms"] == 0.0
        wrong = client.post("/v2/rerank", json={"model": "m", "query": " ", "documents": ["a"]})
        assert (wrong.status_code, set(wrong.json())) == (422, {"message"})


def test_models_change_under_load_without_a_failed_request(deployed, second):
    address, deploy = deployed
    with Load(address) as clients:
        clients.wait_for_answers("a few answers")
        deploy({"default": second})
        wait(
            lambda: clients.answers[-1].json().get("exit_layers") == [1, 3], "the new model answers"
        )
    assert {answer.status_code for answer in clients.answers} == {200}
    assert {tuple(answer.json()["exit_layers"]) for answer in clients.answers} == {
        (1, 2, 3),
        (1, 3),
    }


def test_models_that_cannot_be_loaded_never_replace_good_ones(deployed, cascade, broken, second):
    address, deploy = deployed
    with Load(address) as clients:
        deploy({"default": second})
        wait(lambda: clients.info("exit_layers") == [1, 3], "the good model is taken")
        clients.wait_for_answers("the good model answers")
        names = ranker_names()
        deploy({"default": broken})
        wait(lambda: clients.info("model_problem"), "the rejection is told")
        assert "default" in clients.info("model_problem")
        assert broken not in clients.info("model_problem")
        clients.wait_for_answers("the good model still answers")
        assert ranker_names() == names
        # A replica dies, and the one that replaces it takes the last good models.
        kill_a_ranker()
        clients.wait_for_answers("the other replica answers")
        wait(lambda: ranker_names() - names, "another replica starts")
        wait(lambda: app_status() == "RUNNING", "it runs")
        clients.wait_for_answers("it answers")
        assert clients.info("exit_layers") == [1, 3]
        deploy({"default": cascade})
        wait(lambda: clients.info("exit_layers") == [1, 2, 3], "good models are taken")
        assert clients.info("model_problem") is None
    assert {answer.status_code for answer in clients.answers} == {200}
    best = {tuple(r["index"] for r in answer.json()["ranking"]) for answer in clients.answers}
    assert len(best) <= 2  # of the two models


def test_only_replica_keeps_its_models_when_others_cannot_be_loaded(deployed, cascade, broken):
    address, deploy = deployed
    deploy({"default": cascade}, num_replicas=1)
    wait(lambda: app_status() == "DEPLOYING" or len(ranker_names()) == 1, "it is noticed")
    wait(lambda: app_status() == "RUNNING" and len(ranker_names()) == 1, "one replica runs")
    with Load(address) as clients:
        clients.wait_for_answers("it answers")
        only = ranker_names()
        deploy({"default": broken}, num_replicas=1)
        wait(lambda: clients.info("model_problem"), "the rejection is told")
        clients.wait_for_answers("the good model still answers")
        assert ranker_names() == only
        # Other arguments: a new replica starts beside the only one, and fails.
        deploy({"default": broken}, {"default": broken}, num_replicas=1)
        wait(lambda: app_status() == "DEPLOY_FAILED", "the deployment fails")
        # Serve counts what fails later as a failure of the next deployment.
        wait(lambda: not count_starting(), "gateway and ranker have failed")
        clients.wait_for_answers("the only replica answers")
        assert only <= ranker_names()
        deploy({"default": cascade}, num_replicas=1)
        wait(lambda: app_status() == "RUNNING", "the good deployment runs")
    assert {answer.status_code for answer in clients.answers} == {200}
