"""Drivers in work, and the training workers of this process' cluster."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from patience import start_patiently
from ray._private.node import Node
from ray._raylet import GcsClientOptions, GlobalStateAccessor
from ray.cluster_utils import Cluster
from ray.core.generated import common_pb2
from ray.core.generated.gcs_pb2 import TaskEvents

from as2ray.training.tracking import read_metrics


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
            time.sleep(0.1)

    def output(self) -> str:
        """What the driver said, once it has ended."""
        self.process.wait(timeout=900)
        return self.said.read_text()


def workers() -> list[psutil.Process]:
    """The training workers of this process' cluster."""
    return _find_processes("RayTrainWorker")


def nodes_of_tasks(cluster: Cluster, word: str) -> set[str]:
    """Ids of the nodes where tasks with a word in their names ran, as the head recorded them.

    A look at processes misses tasks that are short.
    """
    options = GcsClientOptions.create(cluster.address, None, True, False)
    accessor = GlobalStateAccessor(options)
    assert accessor.connect()
    events = map(TaskEvents.FromString, accessor.get_task_events())
    return {
        event.state_updates.node_id.hex()
        for event in events
        if word in event.task_info.name and common_pb2.RUNNING in event.state_updates.state_ts_ns
    }


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
