"""Memory while a run goes on: the peak of every process, of the object store, and what it spilled.

Knows processes and Ray's resources. Must not know what is run.
"""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import ray

T = TypeVar("T")

MB = 1024**2


def apart(work: Callable[..., T], *given: object) -> T:
    """The result of `work` in a fresh process, which has its own memory and its own Ray."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *given).result()


@dataclass(frozen=True)
class Memory:
    """Peaks while an epoch ran, MB.

    Each process counts with its own peak, without shared pages. The peak of their sum would grow
    with the length of the run: the longer it is, the likelier all are at their peaks at once.
    """

    driver: float
    workers: float
    """All of them together."""
    processes: int
    """Workers that were seen."""
    object_store: float
    """The highest of the store as a whole."""
    spilled: float
    """The most that lay in the folder of spilled objects."""
    each: dict[str, float] = field(default_factory=dict)
    """Every process of the run, Ray's own among them, by its name and id."""


class Watch:
    """Follows the memory of this process and of all that it started, five times a second.

    Args:
        spill: Folder of spilled objects, where Ray was told one.
    """

    def __init__(self, spill: Path | None = None) -> None:
        self._spill, self._spilled, self._store = spill, 0.0, 0.0
        self._peaks: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._size = ray.cluster_resources()["object_store_memory"]
        self._me = psutil.Process()

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def peaks(self) -> Memory:
        """The highest of each so far."""
        workers = {pid: peak for pid, peak in self._peaks.items() if _works(self._names[pid])}
        return Memory(
            self._peaks.get(self._me.pid, 0.0) / MB,
            sum(workers.values()) / MB,
            len(workers),
            self._store / MB,
            self._spilled / MB,
            {f"{self._names[pid]} {pid}": peak / MB for pid, peak in self._peaks.items()},
        )

    def _run(self) -> None:
        while not self._over.wait(0.2):
            for process in [self._me, *self._me.children(recursive=True)]:
                self._look(process)
            free = ray.available_resources().get("object_store_memory", 0.0)
            self._store = max(self._store, self._size - free)
            if self._spill is not None:
                self._spilled = max(self._spilled, _size(self._spill))

    def _look(self, process: psutil.Process) -> None:
        """Notes a process; one that has ended keeps what it had."""
        try:
            name, found = process.name(), private(process)
        except psutil.Error:
            return
        if "IDLE" not in name or process.pid not in self._names:
            self._names[process.pid] = name
        self._peaks[process.pid] = max(self._peaks.get(process.pid, 0.0), found)


def private(process: psutil.Process) -> float:
    """Bytes that a process has in memory and shares with none; psutil.Error where it ended."""
    found = process.memory_info()
    return float(found.rss - getattr(found, "shared", 0))


def _works(name: str) -> bool:
    return name.startswith("ray::") and "Agent" not in name


def _size(folder: Path) -> float:
    total = 0.0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # restored or deleted between the listing and the look
            continue
    return total
