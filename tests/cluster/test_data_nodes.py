"""A run whose data is read on other nodes."""

import time

import pytest
import ray
from ray._private.state import actors
from running import nodes_of_tasks

from as2ray.distributed.plan import reserve_data_cpus
from as2ray.distributed.workers_config import WorkersConfig

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def names_by_state() -> dict[str, list[str]]:
    """Names of the placement groups of all drivers, without those that are removed."""
    names: dict[str, list[str]] = {}
    for group in ray.util.placement_group_table().values():
        names.setdefault(group["state"], []).append(group["name"])
    names.pop("REMOVED", None)
    return names


def test_run_that_waits_for_the_cpus_of_its_data_holds_no_worker(cluster, start, expected):
    # If it did, two runs could each hold a worker and wait for ever for the other's.
    nodes = [
        cluster.add_node(num_cpus=1, labels={"pool": "cpu"}),
        cluster.add_node(num_cpus=2, labels={"pool": "train"}),
    ]
    labels = {"label_selector": {"pool": "train"}, "data_label_selector": {"pool": "cpu"}}
    ray.init(cluster.address, logging_level="ERROR")
    try:
        with reserve_data_cpus(WorkersConfig(**labels), "another run"):
            run = start(1, pace=0.2, **labels)
            run.until(lambda: "PENDING" in names_by_state())
            time.sleep(3)  # in which a run that does not wait would start its controller
            assert names_by_state() == {"CREATED": ["another run"], "PENDING": [str(run.folder)]}
            assert "TrainController" not in {each["ActorClassName"] for each in actors().values()}
        output = run.output()
        assert run.process.returncode == 0, output
        assert names_by_state() == {}
    finally:
        ray.shutdown()
    assert run.losses() == pytest.approx(expected(1), rel=1e-4)
    assert nodes_of_tasks(cluster, "_pack_windows") == {nodes[0].node_id}
