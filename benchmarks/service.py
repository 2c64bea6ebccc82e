"""Runs a service as a process, waits until it is idle, and stops it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
import psutil

SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds that a service may take to stop."""

IDLE_CORE_SHARE, POLL_INTERVAL_S, IDLE_TIMEOUT_S = 0.5, 1.0, 900.0
"""A service is idle when it uses at most this share of a core between two polls. The timeout is the
time that it may take to become idle."""


def find_free_port() -> int:
    """Returns a port that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def serve_command(model: object, *flags: str) -> tuple[int, list[str]]:
    """Returns a free port, and the command of `as2ray serve` with a model on it.

    Args:
        model: Folder of the ranker.
        flags: Further flags.
    """
    port, code = find_free_port(), "from as2ray.cli.main import main; main()"
    return port, [sys.executable, "-c", code, "serve", f"--model={model}", f"--port={port}", *flags]


@dataclass(frozen=True)
class ServiceProcess:
    """A running service."""

    url: str
    """Address of its rerank endpoint."""
    pid: int
    """Id of its first process; its other processes are children of this one."""


def wait_until_idle(service: ServiceProcess) -> None:
    """Waits until a service has finished the requests that its clients gave up."""
    deadline, previous_s = time.monotonic() + IDLE_TIMEOUT_S, _measure_cpu_seconds(service)
    while time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
        cpu_s = _measure_cpu_seconds(service)
        if cpu_s - previous_s <= IDLE_CORE_SHARE * POLL_INTERVAL_S:
            return
        previous_s = cpu_s
    sys.exit(f"{service.url} is still busy {IDLE_TIMEOUT_S:g} s after its last client left")


def _measure_cpu_seconds(service: ServiceProcess) -> float:
    """Returns the CPU seconds of all processes of a service."""
    first, total = psutil.Process(service.pid), 0.0
    for process in [first, *first.children(recursive=True)]:
        with suppress(psutil.Error):  # the process ended
            total += sum(process.cpu_times()[:2])
    return total


@contextmanager
def run_service(
    port_and_command: tuple[int, list[str]], start_timeout_s: float
) -> Iterator[ServiceProcess]:
    """Runs a service during the context.

    Args:
        port_and_command: Its port and the command that starts it.
        start_timeout_s: Seconds until it must be healthy.
    """
    port, command = port_and_command
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + start_timeout_s
    # In a new session, because Ray ends the process group of a driver that dies.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not _is_healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(
                    f"a service did not start within {start_timeout_s:g} s: {' '.join(command)}"
                )
            time.sleep(0.2)
        yield ServiceProcess(f"{address}/rerank", process.pid)
    finally:
        process.terminate()  # SIGINT is ignored by background processes of a shell
        try:
            process.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
