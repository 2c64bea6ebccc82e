"""Measures the peak memory of a run: its processes, Ray's object store and spilled objects."""

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


def run_in_new_process(function: Callable[..., T], *args: object) -> T:
    """Calls a function in a new process, which has its own memory and its own Ray."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


@dataclass(frozen=True)
class MemoryPeaks:
    """Peak memory during an epoch, MB.

    Sums are over the peaks of single processes, without shared pages. The peak of the sum would
    grow with the length of the run, as all processes are then more likely to peak together.
    """

    driver_mb: float
    workers_mb: float
    """Sum over the worker processes."""
    num_worker_processes: int
    """Number of worker processes during the run."""
    object_store_mb: float
    """Peak of the whole object store."""
    spilled_mb: float
    """Peak size of the folder of spilled objects."""
    process_mb: dict[str, float] = field(default_factory=dict)
    """Peak of every process of the run, including Ray's own, by its name and id."""


class MemoryMonitor:
    """Samples the memory of this process and of its children, five times a second.

    Args:
        spill_folder: Folder of spilled objects, if Ray was given one.
    """

    def __init__(self, spill_folder: Path | None = None) -> None:
        self._spill_folder, self._spilled_bytes, self._object_store_bytes = spill_folder, 0.0, 0.0
        self._peak_bytes: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._object_store_capacity_bytes = ray.cluster_resources()["object_store_memory"]
        self._process = psutil.Process()

    def __enter__(self) -> "MemoryMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def peaks(self) -> MemoryPeaks:
        """Returns the peaks so far."""
        workers = {
            pid: peak for pid, peak in self._peak_bytes.items() if _is_worker(self._names[pid])
        }
        return MemoryPeaks(
            self._peak_bytes.get(self._process.pid, 0.0) / MB,
            sum(workers.values()) / MB,
            len(workers),
            self._object_store_bytes / MB,
            self._spilled_bytes / MB,
            {f"{self._names[pid]} {pid}": peak / MB for pid, peak in self._peak_bytes.items()},
        )

    def _run(self) -> None:
        while not self._stopped.wait(0.2):
            for process in [self._process, *self._process.children(recursive=True)]:
                self._record(process)
            free = ray.available_resources().get("object_store_memory", 0.0)
            self._object_store_bytes = max(
                self._object_store_bytes, self._object_store_capacity_bytes - free
            )
            if self._spill_folder is not None:
                self._spilled_bytes = max(
                    self._spilled_bytes, _measure_folder_bytes(self._spill_folder)
                )

    def _record(self, process: psutil.Process) -> None:
        """Updates the peak of a process; a process that has ended keeps its peak."""
        try:
            name, private_bytes = process.name(), get_private_bytes(process)
        except psutil.Error:
            return
        if "IDLE" not in name or process.pid not in self._names:
            self._names[process.pid] = name
        self._peak_bytes[process.pid] = max(self._peak_bytes.get(process.pid, 0.0), private_bytes)


def get_private_bytes(process: psutil.Process) -> float:
    """Returns the resident bytes that a process does not share; raises psutil.Error if it ended."""
    memory = process.memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def _is_worker(name: str) -> bool:
    return name.startswith("ray::") and "Agent" not in name


def _measure_folder_bytes(folder: Path) -> float:
    total = 0.0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # restored or deleted after it was listed
            continue
    return total
