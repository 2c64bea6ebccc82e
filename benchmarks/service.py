"""A service as a process: started, waited for, left to rest, ended.

Knows processes and `/health`. Must not know what is asked of a service.
"""

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
"""Seconds that a service may take to end."""

IDLE_CORE_SHARE, POLL_INTERVAL_S, IDLE_TIMEOUT_S = 0.5, 1.0, 900.0
"""A service rests when it uses so much of a core over so many seconds; how long that may take."""


def find_free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass(frozen=True)
class ServiceProcess:
    """A service that runs."""

    url: str
    """Where it reranks."""
    pid: int
    """Of its first process; what it started are this one's children."""


def wait_until_idle(service: ServiceProcess) -> None:
    """Waits until a service is done with what its clients gave up."""
    until, before = time.monotonic() + IDLE_TIMEOUT_S, _measure_cpu_seconds(service)
    while time.monotonic() < until:
        time.sleep(POLL_INTERVAL_S)
        now = _measure_cpu_seconds(service)
        if now - before <= IDLE_CORE_SHARE * POLL_INTERVAL_S:
            return
        before = now
    sys.exit(f"{service.url} still works {IDLE_TIMEOUT_S:g} s after its last client left")


def _measure_cpu_seconds(service: ServiceProcess) -> float:
    """Seconds of a core that a service has used."""
    first, total = psutil.Process(service.pid), 0.0
    for process in [first, *first.children(recursive=True)]:
        with suppress(psutil.Error):  # it ended
            total += sum(process.cpu_times()[:2])
    return total


@contextmanager
def run_service(
    port_and_command: tuple[int, list[str]], start_timeout_s: float
) -> Iterator[ServiceProcess]:
    """A service while it runs."""
    port, command = port_and_command
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + start_timeout_s
    # A session of its own: when a driver dies, Ray ends all of its process group.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not _is_healthy(address):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(
                    f"a service did not start within {start_timeout_s:g} s: {' '.join(command)}"
                )
            time.sleep(0.2)
        yield ServiceProcess(f"{address}/rerank", process.pid)
    finally:
        process.terminate()  # where a shell runs us in the background, an interrupt is ignored
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
