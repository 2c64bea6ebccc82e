"""Drivers in work, and the training workers of this process' cluster."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from patience import start_patiently
from ray._private.node import Node
from ray._raylet import GcsClientOptions, GlobalStateAccessor
from ray.cluster_utils import Cluster
from ray.core.generated import common_pb2
from ray.core.generated.gcs_pb2 import TaskEvents

from as2ray.training.tracking import read_metrics

_ENDS = {common_pb2.FINISHED, common_pb2.FAILED}


class PatientCluster(Cluster):
    """A cluster whose nodes may start slowly."""

    def add_node(self, *args, **kwargs) -> Node:
        """See `Cluster`."""
        return start_patiently(lambda: super(PatientCluster, self).add_node(*args, **kwargs))


def told(folder: Path, name: str) -> dict[float, float]:
    """What a run has told of by step: its `loss`, or `dev/AP`."""
    return {x["step"]: x[name] for x in read_metrics(folder / "metrics.jsonl") if name in x}


class Run:
    """A driver in work.

    Args:
        process: The driver.
        said: What it writes to.
        folder: Of its run.
    """

    def __init__(self, process: subprocess.Popen[bytes], said: Path, folder: Path) -> None:
        self.process, self.said, self.folder = process, said, folder

    def maps(self) -> dict[float, float]:
        """Dev MAP by step."""
        return told(self.folder, "dev/AP")

    def losses(self) -> dict[float, float]:
        """Loss by step."""
        return told(self.folder, "train/loss")

    def until(self, reached: Callable[[], bool], seconds: float = 900.0) -> None:
        """Waits for something while the driver works."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, f"ended early:\n{self.output()}"
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.5)

    def output(self) -> str:
        """What the driver said, once it has ended."""
        self.process.wait(timeout=900)
        return self.said.read_text()


def workers() -> list[psutil.Process]:
    """The training workers of this process' cluster."""
    return _find_processes("RayTrainWorker")


@dataclass(frozen=True)
class Task:
    """A task or an actor's call that has ended.

    Attributes:
        name: Of its function, or `Actor.method`.
        job: Of its driver; later drivers have greater ones.
        node_id: Where it ran, in hexadecimal; empty for an actor's start.
        started_at: In nanoseconds of the clock.
        ended_at: The same.
    """

    name: str
    job: str
    node_id: str
    started_at: int
    ended_at: int


def ended_tasks(cluster: Cluster) -> list[Task]:
    """What has ended on a cluster, as its head has recorded it.

    A look at processes misses tasks that are short, and sees workers that are about to exit.
    """
    options = GcsClientOptions.create(cluster.address, None, True, False)
    accessor = GlobalStateAccessor(options)
    assert accessor.connect()
    tasks = []
    for event in map(TaskEvents.FromString, accessor.get_task_events()):
        states, info = event.state_updates, event.task_info
        times = states.state_ts_ns
        if common_pb2.RUNNING in times and (ends := {*times} & _ENDS):
            [end, *_] = ends
            job, node = event.job_id.hex(), states.node_id.hex()
            tasks.append(Task(info.name, job, node, times[common_pb2.RUNNING], times[end]))
    return tasks


def count_nodes() -> int:
    """The nodes of this process' cluster, with the head."""
    return len(_find_processes("raylet/raylet"))


def _find_processes(words: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(True):
        try:
            if words in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # gone between the listing and the look
            continue
    return found
