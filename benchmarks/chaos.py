"""Chaos run: well-behaved clients of three dialects while faults are injected one after the other.

The service runs on a local Ray, on loopback. Faults: hostile bodies, slow clients, clients with
large requests, a ranker that is killed, one that is stopped, models that cannot be loaded, and a
good change of models. The claim is that the well-behaved clients lose nothing but what was refused
with a reason, and that they are answered again within 20 s of each fault.
"""

import argparse
import itertools
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil

from as2ray.errors import ConfigError
from benchmarks.memory import MB, get_private_bytes
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.service import find_free_port

QUESTION, SENTENCE = "Who built the first bridge?", "The bridge was built by the town in 1890. "
MAX_RECOVERY_S, START_TIMEOUT_S, CLIENT_TIMEOUT_S = 20.0, 900.0, 300.0
MAX_EFFECT_S = 60.0
"""Seconds within which a fault is noticed."""
NUM_SLOW_CLIENTS, NUM_HOGS, NUM_FAULTS = 200, 2, 8
MAX_CANDIDATES = 1_000
"""Candidates of a request that the service allows."""
REFUSALS = (408, 413, 429, 503)
SMALL_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": QUESTION, "documents": [SENTENCE] * 8},
    "/v2/rerank": {"model": "m", "query": QUESTION, "documents": [SENTENCE] * 8},
    "/rerank": {"query": QUESTION, "texts": [SENTENCE] * 8},
}
HOSTILE_BODIES: tuple[bytes, ...] = (
    b'{"query":"q","documents":[' + b"1," * 2_000_000 + b"1]}",
    b'{"query":"q","documents":[' + b"{}," * 99_999 + b'{}],"rank_fields":['
    b'"x",' * 499_999 + b'"x"]}',
    b"[" * 4_000_000,
    b'{"query":"q","documents":["\xff"]}',
)


@dataclass
class Phase:
    """What well-behaved clients saw during one fault."""

    latencies_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    """Responses that say in JSON why there is no ranking."""
    num_lost: int = 0
    """Connections without a response, and other responses."""
    last_failure_at: float = 0.0
    recovery_s: float = 0.0
    """Seconds from the fault to the last request that was refused or lost; 0 if none was."""
    memory_mb: float = 0.0


class SmallClients:
    """Clients that send one small request after the other."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.url, self.phase = url, Phase()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]

    def __enter__(self) -> "SmallClients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def start_phase(self) -> Phase:
        """Counts from now on in a new phase, which is returned."""
        with self._lock:
            self.phase = Phase()
        return self.phase

    def _run(self) -> None:
        with httpx.Client(timeout=CLIENT_TIMEOUT_S) as client:
            for path, body in itertools.cycle(SMALL_REQUESTS.items()):
                if self._ended.wait(0.05):
                    return
                sent_at = time.monotonic()
                try:
                    response = client.post(self.url + path, json=body)
                except httpx.HTTPError:
                    self._count("num_lost")
                    continue
                if response.status_code == 200:
                    # Of the fault in which it ends: many are sent just before a fault.
                    self.phase.latencies_s.append(time.monotonic() - sent_at)
                elif response.status_code in REFUSALS and response.json():
                    self._count("num_refused")
                else:
                    self._count("num_lost")

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self.phase, name, getattr(self.phase, name) + 1)
            self.phase.last_failure_at = time.monotonic()


class Service:
    """A service on a Ray of its own."""

    def __init__(self, cascade: str) -> None:
        self.cascade, self.port = cascade, find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(timeout=CLIENT_TIMEOUT_S)

    def deploy(self, checkpoint: str) -> None:
        """Deploys the application with these models, as `serve deploy` does."""
        from ray.serve.schema import ServeDeploySchema

        user_config = {"models": {"default": checkpoint}}
        application = {
            "name": "as2ray",
            "import_path": "as2ray.serving.deployment:build_app",
            "args": {"models": {"default": self.cascade}},
            "deployments": [
                {"name": name, "user_config": user_config} for name in ("ranker", "gateway")
            ],
        }
        get_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def change_models(self, checkpoint: str, are_good: bool) -> None:
        """Deploys other models, and waits until they are taken or rejected."""
        self.deploy(checkpoint)
        wait_for_effect(lambda: (self._get("/info").json()["model_problem"] is None) == are_good)

    def disturb_ranker(self, number: signal.Signals) -> None:
        """Sends a signal to the ranker, and waits until it is missed, or replaced before."""
        disturbed = self.ranker_pids()
        for pid in disturbed:
            os.kill(pid, number)
        wait_for_effect(
            lambda: (
                self._get("/ready").status_code != 200 or self.ranker_pids().isdisjoint(disturbed)
            )
        )

    def ranker_pids(self) -> set[int]:
        """Returns the processes of the ranker that have started."""
        deployments = get_client().get_serve_details()["applications"]["as2ray"]["deployments"]
        replicas = deployments["ranker"]["replicas"]
        return {replica["pid"] for replica in replicas if "pid" in replica}

    def _get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def processes(self) -> list[psutil.Process]:
        """Returns the processes of the Ray."""
        children: list[psutil.Process] = psutil.Process().children(recursive=True)
        return children

    def memory_mb(self) -> float:
        """Returns the private memory of all processes."""
        return sum(get_private_bytes(process) for process in self.processes()) / MB

    def send_hostile_bodies(self) -> None:
        """Sends every hostile body, and expects to be refused."""
        for body in HOSTILE_BODIES:
            headers = {"content-type": "application/json"}
            response = self.client.post(f"{self.url}/v1/rerank", content=body, headers=headers)
            assert response.status_code in (400, 413, 422), response.text

    def open_slow_connections(self, seconds: float) -> None:
        """Opens connections that send one byte of a body."""
        head = b"POST /rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connections = []
        for _ in range(NUM_SLOW_CLIENTS):
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
            connection.sendall(head + b"content-length: 1000\r\n\r\n{")
            connections.append(connection)
        time.sleep(seconds)
        for connection in connections:
            connection.close()

    def send_large_requests(self, seconds: float, num_candidates: int) -> None:
        """Sends requests of many candidates from a few clients."""
        deadline = time.monotonic() + seconds
        body = {"query": QUESTION, "documents": [SENTENCE * 4] * num_candidates}

        def run() -> None:
            while time.monotonic() < deadline:
                self.client.post(f"{self.url}/v1/rerank", json=body)

        threads = [threading.Thread(target=run) for _ in range(NUM_HOGS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def get_client() -> Any:
    """Returns the client of this process' Ray Serve."""
    from ray.serve.context import _get_global_client

    return _get_global_client()


@contextmanager
def run_service(cascade: str) -> Iterator[Service]:
    """Runs a service during the context."""
    import ray
    from ray import serve

    from as2ray.serving.server import _ray_environment

    service = Service(cascade)
    with _ray_environment("127.0.0.1"):
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address="local", **options)
        try:
            http_options = {"host": "127.0.0.1", "port": service.port, "request_timeout_s": 60}
            serve.start(http_options=http_options)
            service.deploy(cascade)
            wait_until_ready(service)
            yield service
            serve.shutdown()
        finally:
            ray.shutdown()


def save_untrained_cascade(folder: Path) -> Path:
    """Saves a cascade of the packaged MiniLM that drops as a trained one; returns the folder."""
    from as2ray.checkpoints.initialization import init_ranker
    from as2ray.checkpoints.packaged import packaged_minilm
    from as2ray.checkpoints.saving import save

    ranker = init_ranker(packaged_minilm(), max_length=128, exit_layers=[2, 3, 4, 6])
    ranker.drop_ratios = [0.83, 0.78, 0.79]
    return save(ranker, folder)


def wait_for_effect(has_effect: Callable[[], bool]) -> None:
    """Waits, but not for ever."""
    deadline = time.monotonic() + MAX_EFFECT_S
    while not has_effect() and time.monotonic() < deadline:
        time.sleep(0.2)


def wait_until_ready(service: Service) -> None:
    """Waits until the service accepts requests."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if service.client.get(f"{service.url}/ready", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise ConfigError(f"the service was not ready within {START_TIMEOUT_S:g} s")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    limit_cores(args.cores)
    phases: dict[str, Phase] = {}
    with TemporaryDirectory(prefix="as2ray-chaos-") as folder:
        cascade = str((args.cascade or save_untrained_cascade(Path(folder) / "cascade")).resolve())
        other, broken = f"{folder}/other", f"{folder}/broken"
        shutil.copytree(cascade, other)
        shutil.copytree(cascade, broken)
        for weights in Path(broken).glob("*.safetensors"):
            os.truncate(weights, weights.stat().st_size // 2)
        with (
            run_service(cascade) as service,
            SmallClients(service.url, 1 if args.small else 4) as clients,
        ):
            seconds = 60 * (0.2 if args.small else args.minutes) / NUM_FAULTS
            num_candidates = 100 if args.small else MAX_CANDIDATES
            faults: dict[str, Callable[[], None]] = {
                "none": lambda: None,
                "hostile bodies": service.send_hostile_bodies,
                "slow clients": partial(service.open_slow_connections, seconds),
                "large requests": partial(service.send_large_requests, seconds, num_candidates),
                "bad models": partial(service.change_models, broken, are_good=False),
                "good models": partial(service.change_models, other, are_good=True),
                "killed ranker": partial(service.disturb_ranker, signal.SIGKILL),
                "stopped ranker": partial(service.disturb_ranker, signal.SIGSTOP),
            }
            assert len(faults) == NUM_FAULTS
            for name, inject in faults.items():
                started_at, phase = time.monotonic(), clients.start_phase()
                inject()
                time.sleep(max(1.0, started_at + seconds - time.monotonic()))
                wait_until_ready(service)
                num_answers = len(phase.latencies_s)
                time.sleep(1)  # later failures are of this fault, too
                wait_for_effect(lambda p=phase, n=num_answers: len(p.latencies_s) > n)
                phase.recovery_s = max(0.0, phase.last_failure_at - started_at)
                phase.memory_mb = service.memory_mb()
                phases[name] = phase
    results = {name: asdict(phase) for name, phase in phases.items()}
    write_report("chaos", args, [_describe(*item) for item in phases.items()], results)


def _describe(name: str, phase: Phase) -> Claim:
    latencies_s = phase.latencies_s or [float("inf")]
    p99_s, longest_s = float(np.quantile(latencies_s, 0.99)), max(latencies_s)
    measured = (
        f"{len(phase.latencies_s):,} answered (p99 {p99_s:.2f} s, longest {longest_s:.1f} s), "
        f"{phase.num_refused} refused, {phase.num_lost} lost, last after {phase.recovery_s:.1f} s, "
        f"{phase.memory_mb:,.0f} MB"
    )
    # A request that waits for a new ranker is neither refused nor lost, but not answered either.
    holds = not phase.num_lost and max(phase.recovery_s, longest_s) <= MAX_RECOVERY_S
    return Claim(f"{name}: none lost, answered again within 20 s", measured, holds)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cascade", type=Path, help="checkpoint; by default an untrained MiniLM")
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of all faults")


if __name__ == "__main__":
    main()
