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

GOODBYE = 30.0
"""Seconds that a service may take to end."""

IDLE, LOOK, REST = 0.5, 1.0, 900.0
"""A service rests when it uses so much of a core over so many seconds; how long that may take."""


def free() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass(frozen=True)
class Service:
    """A service that runs."""

    url: str
    """Where it reranks."""
    pid: int
    """Of its first process; what it started are this one's children."""


def rest(service: Service) -> None:
    """Waits until a service is done with what its clients gave up."""
    until, before = time.monotonic() + REST, _worked(service)
    while time.monotonic() < until:
        time.sleep(LOOK)
        now = _worked(service)
        if now - before <= IDLE * LOOK:
            return
        before = now
    sys.exit(f"{service.url} still works {REST:g} s after its last client left")


def _worked(service: Service) -> float:
    """Seconds of a core that a service has used."""
    first, total = psutil.Process(service.pid), 0.0
    for process in [first, *first.children(recursive=True)]:
        with suppress(psutil.Error):  # it ended
            total += sum(process.cpu_times()[:2])
    return total


@contextmanager
def served(what: tuple[int, list[str]], patience: float) -> Iterator[Service]:
    """A service while it runs."""
    port, command = what
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + patience
    # A session of its own: when a driver dies, Ray ends all of its process group.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"a service did not start within {patience:g} s: {' '.join(command)}")
            time.sleep(0.2)
        yield Service(f"{address}/rerank", process.pid)
    finally:
        process.terminate()  # where a shell runs us in the background, an interrupt is ignored
        try:
            process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
