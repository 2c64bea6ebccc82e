"""Around Serve, without it: how `as2ray serve` ends, and what gateways make of replicas' errors."""

import asyncio
import math
import os
import signal
import socket
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.testclient import TestClient

from as2ray.errors import CheckpointError, ConfigError, ResourceError
from as2ray.serving import deployment, server
from as2ray.serving.admission import Admission
from as2ray.serving.metrics import ServiceMetrics, counts_in_process
from as2ray.serving.settings import ServiceConfig
from as2ray.serving.types import (
    ModelInfo,
    RequestError,
    RerankRequest,
    RerankResult,
    TimeBudget,
)


class Serve:
    """Stands in for `ray.serve`; a signal comes once it serves."""

    def __init__(self, others: dict, ends: signal.Signals) -> None:
        self.applications, self.ends, self.done, self.ongoing = others, ends, [], [0, 2, 2, 2]
        self.received, self.options = [7], {}

    def start(self, **options) -> None:
        self.options = options

    def get_app_handle(self, name):
        return self

    def _init(self, *, _run_router_in_separate_loop: bool) -> None:
        assert _run_router_in_separate_loop

    def broadcast(self, method):
        self.done.append(method)
        counts = tuple(
            numbers.pop() if len(numbers) > 1 else numbers[0]
            for numbers in (self.ongoing, self.received)
        )
        return SimpleNamespace(results=lambda timeout_s: [counts])

    def run(self, application, name, blocking) -> None:
        self.applications[name] = application
        signal.raise_signal(self.ends)
        raise AssertionError(f"{self.ends!r} does not end it")

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=self.applications)

    def delete(self, name) -> None:
        self.done.append(f"delete {name}")

    def shutdown(self) -> None:
        self.done.append("shutdown")


def run_without_ray(monkeypatch, serve: Serve) -> None:
    """Lets `run_server` use the stand-in, on a node of two CPUs."""
    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # by tests before, it may be
    monkeypatch.setattr(server, "ray_session", nullcontext)
    monkeypatch.setattr(server, "build_app", lambda args: args)
    monkeypatch.setattr(server, "node_resources", lambda: [{"CPU": 2.0}])


@pytest.fixture
def handlers():
    """Those of a process that no shell started in the background, where SIGINT is ignored."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("others", "done"), [({}, "shutdown"), ({"another": 1}, "delete as2ray")])
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_our_application_and_no_other(monkeypatch, capsys, others, done, ends):
    serve = Serve(dict(others), ends)
    run_without_ray(monkeypatch, serve)
    server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", 0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert serve.done == ["drain", *["count_requests"] * (len(serve.done) - 2), done]
    assert serve.ongoing == [0]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["as2ray: interrupted; requests to answer first: 2", "as2ray: stopped"]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("ongoing", "lines"),
    [
        ([0], ["as2ray: stopped"]),
        (
            [1],
            [
                "as2ray: interrupted; requests to answer first: 1",
                "as2ray: stopped; requests without an answer after 0.3 s: 1",
            ],
        ),
        ([], ["as2ray: stopped before it was ready (IndexError)"]),
        ([None, 0], ["as2ray: stopped; a gateway failed (TypeError)"]),
        (
            [None, 2, 0],
            [
                "as2ray: interrupted; requests to answer first: 2",
                "as2ray: stopped; a gateway failed (TypeError); requests without an answer by "
                "then: 2",
            ],
        ),
    ],
)
def test_the_last_line_tells_what_became_of_requests(monkeypatch, capsys, ongoing, lines):
    serve = Serve({}, signal.SIGINT)
    serve.ongoing = ongoing
    run_without_ray(monkeypatch, serve)
    monkeypatch.setattr(server, "MIN_QUIET_S", 0.1)
    monkeypatch.setattr(server, "DRAIN_POLL_S", 0.05)
    timeout_s = 0.3 if ongoing == [1] else 60.0  # a busy machine polls once in a second
    config = ServiceConfig(models={"a": "x"}, drain_timeout_s=timeout_s)
    server.run_server(config, "127.0.0.1", 0)
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.usefixtures("handlers")
def test_requests_that_still_come_in_are_waited_for(monkeypatch, capsys):
    """A proxy may send what it has received before; then it is quiet, twice in a row."""
    serve = Serve({}, signal.SIGINT)
    serve.ongoing, serve.received = [0], [6, 6, 6, 5, 4, 3]
    run_without_ray(monkeypatch, serve)
    monkeypatch.setattr(server, "MIN_QUIET_S", 0.04)
    monkeypatch.setattr(server, "DRAIN_POLL_S", 0.02)
    config = ServiceConfig(models={"a": "x"}, limits={"request_timeout_s": 7})
    server.run_server(config, "127.0.0.1", 0)
    assert serve.done == ["drain", *["count_requests"] * 5, "shutdown"]
    assert capsys.readouterr().err == "as2ray: stopped\n"
    assert serve.options["http_options"]["request_timeout_s"] == 14


@pytest.mark.usefixtures("handlers")
def test_a_second_interrupt_ends_at_once_without_a_traceback(monkeypatch, capsys):
    class Hanging(Serve):
        def broadcast(self, method):
            signal.raise_signal(signal.SIGINT)

    def end(status):
        raise SystemExit(status)

    serve = Hanging({}, signal.SIGTERM)
    monkeypatch.setattr(server.os, "_exit", end)
    monkeypatch.setattr(server.ray, "is_initialized", lambda: False)  # tests before may use Ray
    run_without_ray(monkeypatch, serve)
    with pytest.raises(SystemExit, match="0"):
        server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", 0)
    assert serve.done == []
    assert "second interrupt" in capsys.readouterr().err


@pytest.mark.usefixtures("handlers")
def test_serve_that_does_not_start_is_told_in_a_sentence(monkeypatch):
    class Busy(Serve):
        def start(self, **_) -> None:
            assert os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] == "60"
            raise RayActorError

    serve = Busy({}, signal.SIGTERM)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(server.ray, "is_initialized", lambda: False)
    run_without_ray(monkeypatch, serve)
    with pytest.raises(ResourceError, match="before the service was ready"):
        server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", 0)
    assert serve.done == ["shutdown"]


@pytest.fixture
def started(monkeypatch) -> list:
    """What was started of a Ray of one node of two CPUs, which here is none at all."""
    found = []

    @contextmanager
    def connected():
        found.append("ray")
        yield

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(server, "ray_session", connected)
    monkeypatch.setattr(server.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(server, "node_resources", lambda: [{"CPU": 2.0}])
    monkeypatch.setattr(server, "build_app", lambda args: args)
    monkeypatch.setattr(server, "serve", SimpleNamespace(start=lambda **_: found.append("serve")))
    return found


def test_a_port_that_is_taken_is_told_before_ray_starts(started):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"host 127\.0\.0\.1, port {port}: .*in use"):
            server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", port)
    assert not started


def test_a_port_that_others_may_share_is_not_shared(started):
    with socket.socket() as other:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=r"in use"):
            server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", port)
    assert not started


def test_a_port_for_which_another_service_starts_is_told_before_ray_starts(started):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with server._lock_address("127.0.0.1", port):
        with pytest.raises(ConfigError, match=r"another `as2ray serve` uses it"):
            server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", port)
        with server._lock_address("127.0.0.2", port):  # another address
            pass
    assert not started
    with server._lock_address("127.0.0.1", port):
        pass


def test_port_0_is_another_free_port_for_each_service(started, monkeypatch):
    ports = []

    def listen(application, host, port, config):
        with socket.create_server((host, port)):
            ports.append(port)
            if len(ports) == 1:
                server.run_server(config, host, 0)

    monkeypatch.setattr(server, "_serve", listen)
    server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", 0)
    assert 0 not in ports
    assert len(set(ports)) == 2


def test_port_0_on_a_cluster_is_told_before_it_is_connected(started, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "cluster:1")
    with pytest.raises(ConfigError, match="port 0: each node"):
        server.run_server(ServiceConfig(models={"a": "x"}), "127.0.0.1", 0)
    assert not started


def test_a_local_ray_opens_its_metrics_to_nobody_but_others(monkeypatch):
    monkeypatch.setenv("RAY_COLOR_PREFIX", "1")
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    for host, is_open in (("localhost", False), ("::1", False), ("0.0.0.0", True)):
        with server._ray_environment(host):
            # With 0 no proxy could start for a minute after another one with connections.
            assert os.environ.get("SERVE_SOCKET_REUSE_PORT_ENABLED", "1") == "1"
            assert os.environ["FORWARDED_ALLOW_IPS"] == ""
            assert server.SERVE_VARIABLES.items() <= os.environ.items()
            assert counts_in_process() is not is_open
            for name in server.OTHER_METRICS_PORTS:
                assert (name in os.environ) is not is_open
            assert os.environ["RAY_COLOR_PREFIX"] == "1"
        assert not counts_in_process()
        assert "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S" not in os.environ


def test_on_loopback_only_names_of_this_machine_are_answered(started, monkeypatch):
    configs = []
    monkeypatch.setattr(server, "build_app", configs.append)
    monkeypatch.setattr(server, "_serve", lambda *_: None)
    monkeypatch.setattr(server, "_check_address", lambda *_: None)
    for host in ("localhost", "0.0.0.0"):
        server.run_server(ServiceConfig(models={"a": "x"}), host, 0)
    assert [bool(config.allowed_hosts) for config in configs] == [True, False]


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99_999), ("203.0.113.1", 0)])
def test_an_address_that_is_not_here_is_told_before_ray_starts(started, host, port):
    with pytest.raises(ConfigError, match=f"port {port}"):
        server.run_server(ServiceConfig(models={"a": "x"}), host, port)
    assert not started


@pytest.mark.parametrize(
    "replicas",
    [
        {"num_cpus": 64},
        {"num_cpus": 64, "min_replicas": 0},
        {"num_cpus": 2},
        {"num_cpus": 1, "min_replicas": 2, "max_replicas": 2},
        {"num_cpus": 1, "num_gpus": 1},
    ],
)
def test_replicas_without_room_on_a_ray_of_our_own_are_refused(started, replicas):
    with pytest.raises(ResourceError, match="this machine has 2 CPU"):
        server.run_server(ServiceConfig(models={"a": "x"}, replicas=replicas), "127.0.0.1", 0)
    assert started == ["ray"]


class Replicas:
    """A handle whose calls end one after the other as they were told."""

    def __init__(self, *ends) -> None:
        self.ends = list(ends)
        self.rank = self.get_model_info = self.ping = self

    def options(self, multiplexed_model_id: str) -> "Replicas":
        self.checkpoint = multiplexed_model_id
        return self

    async def remote(self, *args):
        self.args = args
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        if end is WAITS:
            await asyncio.Event().wait()
        return end


WAITS = "a call that waits for a replica"
FULL = BackPressureError(num_queued_requests=1, max_queued_requests=1)
INFO = ModelInfo(60, (1, 2), (0.5,))
REQUEST = RerankRequest("q", ["a"], "a")


@pytest.fixture
def gateway():
    def make(*ends, min_replicas: int = 1) -> deployment.Gateway:
        made = object.__new__(deployment.Gateway)  # to make one as Serve does takes a replica
        settings = ServiceConfig(
            models={"a": "x"}, replicas={"min_replicas": min_replicas}
        ).settings
        made.ranker, made.settings = Replicas(*ends), settings
        made.models, made.model_infos = {"a": "x", "b": "y"}, {}
        made.last_response_at, made.num_missed_pings = -math.inf, 0
        return made

    return make


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([FULL], "overloaded"),
        ([RayActorError(), FULL], "overloaded"),
        ([DeploymentUnavailableError("ranker")], "unavailable"),
        ([RayActorError(), RayActorError()], "unavailable"),
        ([TimeoutError()], "timeout"),
    ],
)
@pytest.mark.parametrize("asks", ["rank", "get_model_info"])
def test_a_gateway_tells_replicas_that_are_full_or_gone_by_their_kind(gateway, asks, ends, code):
    made = gateway(*ends)
    asked = made.rank(REQUEST) if asks == "rank" else made.get_model_info("a")
    with pytest.raises(RequestError) as refused:
        asyncio.run(asked)
    assert refused.value.code == code


def test_gateway_says_how_much_of_a_budget_has_passed(gateway):
    made = gateway(RerankResult("a", [], 0))
    budget = TimeBudget(500, time.monotonic() - 0.2)
    asyncio.run(made.rank(replace(REQUEST, budget=budget)))
    sent, _ = made.ranker.args
    assert 0.2 <= sent.budget.sent_after_s < 5
    assert sent.budget.ends_at == budget.ends_at


def test_checkpoint_of_a_request_ranks_it_whatever_its_name_has_become(gateway):
    for changes, expected in (({}, "x"), ({"checkpoint": "before", "model": "gone"}, "before")):
        deployed = gateway(RerankResult("a", [], 0))
        asyncio.run(deployed.rank(replace(REQUEST, **changes)))
        assert deployed.ranker.checkpoint == expected


def test_facts_are_asked_again_of_another_replica_and_then_known(gateway):
    made = gateway(RayActorError(), INFO)
    for _ in range(2):
        assert asyncio.run(made.get_model_info("a")) == INFO


@pytest.mark.parametrize("silence_s", [math.inf, 100.0, 0.0])
def test_silent_rankers_are_noticed_without_asking_them(gateway, silence_s):
    made = gateway()
    made.last_response_at = time.monotonic() - silence_s
    made.num_missed_pings = 2
    if silence_s:
        with pytest.raises(RequestError, match="starting" if silence_s == math.inf else "100 s"):
            made.check_rankers()
    else:
        made.check_rankers()


@pytest.mark.parametrize("errors", [1, 2])
def test_gateway_without_a_core_for_long_does_not_miss_its_rankers(gateway, monkeypatch, errors):
    monkeypatch.setattr(deployment, "PING_PERIOD_S", 0.01)
    waiting = gateway(*[RayActorError() for _ in range(errors)])

    async def ping() -> None:
        waiting._note_response()
        task = asyncio.create_task(waiting._ping_rankers())
        while waiting.num_missed_pings < errors:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(ping())
    waiting.check_rankers()  # it has missed pings for less than the maximum
    waiting.last_response_at -= 6
    if errors == 1:
        waiting.check_rankers()  # it had no core
    else:
        with pytest.raises(RequestError, match="6 s"):
            waiting.check_rankers()


def test_pings_tell_that_rankers_respond(gateway, monkeypatch):
    monkeypatch.setattr(deployment, "PING_PERIOD_S", 0.01)
    made = gateway(RayActorError(), FULL, "pong")

    async def ping() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await made._ping_rankers()

    assert made.last_response_at == -math.inf
    asyncio.run(ping())
    made.check_rankers()


def test_index_is_served_without_rankers(gateway, index):
    application = deployment.build_app(ServiceConfig(index_path=index))
    ranker, *_ = application._bound_deployment.init_args
    assert ranker is None
    index_gateway = gateway()
    index_gateway.ranker, index_gateway.models, index_gateway.service_metrics = (
        None,
        {},
        ServiceMetrics(),
    )
    asyncio.run(index_gateway.reconfigure({"models": {}}))
    index_gateway.check_rankers()


def test_gateway_opens_its_index_and_asks_for_its_tokens(gateway, index, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-file\n")
    tokens.chmod(0o600)
    index_gateway = gateway()
    settings = ServiceConfig(index_path=index, auth_token_file=str(tokens)).settings
    index_gateway.settings, index_gateway.admission = settings, Admission(settings)
    index_gateway.ranker, index_gateway.models = None, {}
    index_gateway.service_metrics = ServiceMetrics()
    body, headers = (
        {"question": "What is kovarin?"},
        {"authorization": "Bearer a-token-of-the-file"},
    )
    with TestClient(index_gateway.__serve_build_asgi_app__()) as client:
        assert client.post("/ask", json=body).status_code == 401
        answer = client.post("/ask", json=body, headers=headers)
    assert answer.status_code == 200
    assert "Kovarin" in answer.json()["answers"][0]["text"]


def test_where_no_ranker_need_live_requests_are_accepted(gateway):
    gateway(min_replicas=0).check_rankers()


def test_a_new_gateway_accepts_requests_once_replicas_have_described_its_models(gateway):
    class Store:
        def replace_rejected(self, models):
            return models, None

    models = {"models": {"a": "x"}}
    for ends, is_accepted in (([None, INFO], True), ([None, RayActorError()], False)):
        made = gateway(*ends)
        made.models, made.model_store, made.ping_task = {}, Store(), None
        made.service_metrics = SimpleNamespace(start_gateway=lambda models: None)
        if is_accepted:
            asyncio.run(made.reconfigure(models))
            made.check_rankers()
        else:  # it must not replace a gateway whose models rank
            with pytest.raises(RayActorError):
                asyncio.run(made.reconfigure(models))


def test_a_new_gateway_ends_where_no_replica_could_start_after_it_has_asked(gateway, monkeypatch):
    class Store:
        def replace_rejected(self, models):
            return models, None

    monkeypatch.setattr(deployment, "PING_TIMEOUT_S", 0.01)
    new_gateway = gateway(WAITS, DeploymentUnavailableError("ranker"))
    new_gateway.models, new_gateway.model_store = {}, Store()
    with pytest.raises(DeploymentUnavailableError):
        asyncio.run(asyncio.wait_for(new_gateway.reconfigure({"models": {"a": "x"}}), 5))


def test_a_gateway_keeps_its_models_where_replicas_cannot_load_others(gateway):
    class Store:
        def replace_rejected(self, models):
            return {"a": "x"}, "the models were rejected"

    made = gateway(RayActorError())
    made.model_store = Store()
    asyncio.run(made.reconfigure({"models": {"a": "z"}}))
    assert made.models == {"a": "x", "b": "y"}
    assert made.model_problem == "the models were rejected"


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_gateway_names_models_whose_rejection_no_replica_has_stored(gateway, wrapped):
    class Store:
        def replace_rejected(self, models):
            return models, None

    error = CheckpointError("/secret/z is no checkpoint")
    if wrapped:
        error = RayTaskError("load", "traceback", error).as_instanceof_cause()
    refused = gateway(error)
    refused.model_store = Store()
    asyncio.run(refused.reconfigure({"models": {"a": "/secret/z"}}))
    assert refused.model_problem == "the models ['a'] were rejected: the model a is no checkpoint"


@pytest.mark.parametrize("user_config", [{"models": {}}, {}, {"models": {"é": "x"}}])
def test_a_gateway_keeps_its_models_where_others_are_wrong(gateway, user_config):
    class Store:
        def replace_rejected(self, models):  # no replica has refused them yet
            return models, None

    made = gateway()
    made.model_store = Store()
    asyncio.run(made.reconfigure(user_config))
    assert made.models == {"a": "x", "b": "y"}
    assert made.model_problem.startswith("the models were rejected: ")
