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
from running import PatientCluster, Run, told

from as2ray.training.run_job import train


@pytest.fixture(scope="module")
def cluster(_forked_workers) -> Iterator[Cluster]:
    """A head without a CPU for work, which soon sees that a node is lost.

    A test adds the nodes that it needs.
    """
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
    head["include_log_monitor"] = False  # No test reads what workers print.
    looks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    made = PatientCluster(initialize_head=True, head_node_args=head | {"_system_config": looks})
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
    """Starts a driver: `start(epochs, pace, name, **workers)`; again to start it once more.

    By default the run saves a resume state after every epoch. A state waits until the controller,
    which looks every `pace` seconds, knows the one before, so an epoch lasts as long.
    """
    states = {"resume_interval_s": 0.001, "preemption_check_steps": 25}
    started = []

    def begin(epochs: int, pace: float, name: str = "run", **plan: object) -> Run:
        folder = tmp_path / "runs" / name
        command = [sys.executable, str(Path(__file__).with_name("driver.py")), *arguments]
        environment = {
            "RAY_ADDRESS": cluster.address,
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(pace),
        }
        if "min_workers" in plan:
            environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "5"
        said = tmp_path / f"driver-{len(started)}.log"
        with said.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(folder), str(epochs), json.dumps(states | plan)],
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return Run(process, said, folder)

    yield begin
    for process in started:
        process.kill()


@pytest.fixture
def expected(arguments, tmp_path) -> Callable[[int], dict[float, float]]:
    """Loss by step where nothing fails: `expected(epochs)`."""

    def here(epochs: int) -> dict[float, float]:
        train(job(*map(Path, arguments), epochs), tmp_path / "here")
        return told(tmp_path / "here", "train/loss")

    return here
