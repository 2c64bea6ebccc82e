"""A recipe on nodes that see no folder of each other: all they share is an object store."""

import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from patience import NUM_RESTARTS
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from running import PatientCluster

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.recipe import read_recipe
from as2ray.training.tracking import read_metrics
from pipelines import transfer_adapt

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


RAY = str(Path(sys.executable).with_name("ray"))


class Node:
    """A node whose cache is a folder that no other process sees under the same path.

    Args:
        cluster: Its cluster.
        cache: Where all processes have their cache.
        disk: What this node sees there.
        flags: Flags of `ray start`.
    """

    def __init__(self, cluster: Cluster, cache: Path, disk: Path, **flags: object) -> None:
        self.disk = disk
        disk.mkdir()
        with (
            socket.create_server(("127.0.0.1", 0)) as http,
            socket.create_server(("127.0.0.1", 0)) as grpc,
        ):
            flags |= {"dashboard-agent-listen-port": http.getsockname()[1]}
            flags |= {"dashboard-agent-grpc-port": grpc.getsockname()[1]}
        flags |= {"address": cluster.address, "object-store-memory": 10**8}
        start = [RAY, "start", "--block", *(f"--{name}={value}" for name, value in flags.items())]
        mounted = f'mount --bind {disk} {cache} && exec "$@"'
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mounted, "sh", *start],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """Ends all processes of the node at once."""
        if self.process.poll() is None:
            started = psutil.Process(self.process.pid)
            for process in [*started.children(recursive=True), started]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()


def alive_nodes(cluster: Cluster) -> set[object]:
    """The ids of the nodes that the head has heard of and not given up."""
    nodes = GcsClient(address=cluster.address).get_all_node_info().items()
    return {node_id for node_id, node in nodes if node.state == node.ALIVE}


@pytest.fixture
def add_node(bucket, tmp_path, monkeypatch, forked_workers_elsewhere):
    """Adds a node to a head without CPUs: `add_node(pool, num_cpus)`."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this process may not mount folders")
    cache = tmp_path / "home" / ".cache" / "as2ray"
    cache.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
    looks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    cluster = PatientCluster(initialize_head=True, head_node_args=head | {"_system_config": looks})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    nodes = []

    def add(pool: str, num_cpus: int) -> Node:
        flags = {"num-cpus": num_cpus, "labels": f"pool={pool}"}
        before = alive_nodes(cluster)
        for _ in range(1 + NUM_RESTARTS):
            nodes.append(Node(cluster, cache, tmp_path / f"{pool}-{len(nodes)}", **flags))
            # Two that start at once would choose the same sockets.
            while nodes[-1].process.poll() is None:
                if alive_nodes(cluster) - before:
                    return nodes[-1]
                time.sleep(0.5)
        # On a busy machine Ray waits 15 s for a node's agents, and then gives the node up.
        raise AssertionError("no node starts")

    yield add
    for node in nodes:
        node.kill()
    cluster.shutdown()


@pytest.fixture
def recipe(checkpoint, tmp_path):
    still = checkpoint("bert", None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    table = {"corpus": "python_reference", "num_questions": 40, "max_negatives": 9}
    training = {"epochs": 8, "global_batch_size": 16, "learning_rate": 1e-3, "precision": "fp32"}
    values = {
        "title": "No shared disk",
        "model": {"path": str(still), "max_length": 32},
        "tables": {split: table | {"split": split} for split in ("train", "dev")},
        "dev": "dev",
        "tests": ["dev"],
        "runs": {"only": {"train": ["train"], "training": training}},
        "baseline": "only",
        "seeds": [0],
        "tracking": {"log_every_steps": 1},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def read_losses(path):
    return {x["step"]: x["train/loss"] for x in read_metrics(path) if "train/loss" in x}


def test_run_goes_on_from_the_object_store_on_a_node_that_has_nothing(
    add_node, bucket, recipe, tmp_path
):
    stages, first = add_node("stages", 1), add_node("train", 2)
    output = tmp_path / "out"
    flags = {
        "num_workers": 1,
        "resume_interval_s": 0.5,
        "preemption_check_steps": 5,
        "label_selector": json.dumps({"pool": "train"}),
        "driver_label_selector": json.dumps({"pool": "stages"}),
        "max_failures": -1,
        "provision_timeout_s": 900,
    }
    command = [
        *(sys.executable, "-m", "pipelines.transfer_adapt", "--config", str(recipe)),
        *("--output", str(output), "--store", f"{bucket}/store"),
        *(word for name, value in flags.items() for word in (f"--workers.{name}", str(value))),
        "--verbose",  # each step has its line
    ]
    said = tmp_path / "driver.log"
    with said.open("wb") as file:
        driver = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 900
        while "step 60/" not in said.read_text():
            assert driver.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        first.kill()
        second = add_node("train", 2)
        assert driver.wait(timeout=900) == 0, said.read_text()
    finally:
        driver.kill()
    here = tmp_path / "here"
    values, *_ = read_recipe(transfer_adapt.Recipe, ["--config", str(recipe), "--output", "out"])
    transfer_adapt.PIPELINE.run(values, here, WorkersConfig(num_workers=0))
    [metrics] = stages.disk.rglob("TrainedRanker/*/metrics.jsonl")
    assert read_losses(metrics) == pytest.approx(
        read_losses(here / "rankers/only-seed0/metrics.jsonl"), abs=1e-3
    )
    report, expected = (json.loads((folder / "dev.json").read_text()) for folder in (output, here))
    assert report["rows"] == expected["rows"]
    # The second node has written the last lines only: those before came from the store.
    assert "continues after step" in said.read_text()
    assert [*second.disk.rglob("TableScores/*/part-*.parquet")]
