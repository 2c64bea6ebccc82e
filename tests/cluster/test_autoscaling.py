"""Nodes start for a run that waits for them, and stop when it has ended."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private.services import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from running import count_nodes

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

HEAD_ID = "f" * 51 + "00000"
"""By which Ray's provider of local nodes knows the head."""

ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_enable_autoscaler_v2": "1",  # the first version does not know labels
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, forked_workers_elsewhere) -> Iterator[SimpleNamespace]:
    """A head without a CPU for work, which starts up to two nodes of two CPUs on this machine.

    Ray's own cluster for such tests ends every Ray of the machine when it starts and stops.
    """
    folder = tmp_path_factory.mktemp("autoscaling")
    with socket() as server:
        server.bind(("", 0))
        port = server.getsockname()[1]
    address = f"{get_node_ip_address()}:{port}"
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    node = {"CPU": 2, "object_store_memory": 10**8}
    config = {
        "cluster_name": "test",
        "max_workers": 2,
        "idle_timeout_minutes": 0.2,
        "provider": {
            "type": "external",
            "module": provider,
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": node,
                "node_config": {},
                "max_workers": 2,
                "labels": {"kind": "worker"},
            },
        },
        "head_node_type": "ray.head.default",
        **{f"{name}setup_commands": [] for name in ("", "head_", "worker_")},
        "cluster_synced_files": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    ray = Path(sys.executable).with_name("ray")
    options = {
        "port": port,
        "num-cpus": 0,
        "object-store-memory": 10**8,
        "include-dashboard": "false",
        "include-log-monitor": "false",
        "autoscaling-config": folder / "config.json",
    }
    with pytest.MonkeyPatch.context() as patch, (folder / "head.log").open("wb") as log:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", *(f"--{k}={v}" for k, v in options.items())],
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 900
        while "Ray runtime started" not in (folder / "head.log").read_text():
            assert time.monotonic() < deadline, (folder / "head.log").read_text()
            time.sleep(0.5)
        yield SimpleNamespace(address=address)
        for process in [*psutil.Process(head.pid).children(recursive=True), head]:
            process.kill()
        head.wait()


def test_nodes_start_for_a_run_beside_another_one_and_stop_after_them(cluster, start):
    labels = {"kind": "worker"}
    ray.init(cluster.address, logging_level="ERROR")
    try:
        other = placement_group([{"CPU": 2}], bundle_label_selector=[labels])
        run = start(1, pace=0.2, provision_timeout_s=900, label_selector=labels)
        most_nodes = 0

        def is_complete() -> bool:
            nonlocal most_nodes
            most_nodes = max(most_nodes, count_nodes())
            return (run.folder / "best").exists()

        run.until(is_complete)
        output = run.output()
        assert run.process.returncode == 0, output
        assert most_nodes == 3
        remove_placement_group(other)
        deadline = time.monotonic() + 900
        while count_nodes() > 1:
            assert time.monotonic() < deadline, "nodes that nobody needs are not stopped"
            time.sleep(0.5)
    finally:
        ray.shutdown()
