"""A cluster of several nodes on this machine, and programs that run on it.

The nodes are raylets of this process; the programs are processes of their own, as a process cannot
be connected to two clusters.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from driver import job
from ray.cluster_utils import Cluster
from running import Run, maps

from as2ray.training.job import train_here


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with one CPU, which no worker takes: data's."""
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8},
    )
    yield made
    made.shutdown()


@pytest.fixture
def arguments(checkpoint, corpus, tmp_path) -> list[str]:
    """The driver's first arguments: a model without dropout, which would differ by worker."""
    still = checkpoint("bert", None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    dev = tiny.write_corpus(tmp_path / "dev", tiny.candidates(20, seed=7))
    return [str(still), str(corpus), str(dev)]


@pytest.fixture
def start(cluster, arguments, tmp_path) -> Iterator[Callable[..., Run]]:
    """Starts a driver: `start(epochs, **workers)`; again to start it once more."""
    started = []

    def begin(epochs: int, **plan: object) -> Run:
        folder = tmp_path / "runs" / "run"
        command = [sys.executable, str(Path(__file__).with_name("driver.py")), *arguments]
        quick = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15", "RAY_ADDRESS": cluster.address}
        process = subprocess.Popen(
            [*command, str(folder), str(epochs), json.dumps({"data_cpus": 1, **plan})],
            env=os.environ | quick,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return Run(process, folder)

    yield begin
    for process in started:
        process.kill()


@pytest.fixture
def expected(arguments, tmp_path) -> Callable[[int], dict[float, float]]:
    """Dev MAP by step where nothing fails: `expected(epochs)`."""

    def here(epochs: int) -> dict[float, float]:
        train_here(job(*map(Path, arguments), epochs), tmp_path / "here")
        return maps(tmp_path / "here")

    return here
