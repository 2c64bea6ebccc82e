"""Runs that want more than the cluster has finish one after another."""

import time

import pytest
from running import packing_tasks, workers

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_two_runs_whose_data_is_read_on_other_nodes_finish_one_after_another(
    cluster, start, expected
):
    # Of two runs that reserve their workers first, each could hold a worker and wait for data.
    nodes = [
        cluster.add_node(num_cpus=1, labels={"pool": "cpu"}),
        cluster.add_node(num_cpus=2, resources={"worker": 2}, labels={"pool": "train"}),
    ]
    labels = {"label_selector": {"pool": "train"}, "data_label_selector": {"pool": "cpu"}}
    runs = [start(1, pace=0.2, name=f"apart-{number}", **labels) for number in range(2)]
    losses = expected(1)
    raylets, most_workers = set(), 0
    while any(run.process.poll() is None for run in runs):
        raylets |= {process.ppid() for process in packing_tasks()}
        most_workers = max(most_workers, len(workers()))
        time.sleep(1)
    for run in runs:
        assert run.process.returncode == 0, run.output()
        assert run.losses() == pytest.approx(losses, rel=1e-4)
    assert most_workers == 1
    assert raylets == {nodes[0].all_processes["raylet"][0].process.pid}
    for node in nodes:
        cluster.remove_node(node)


def test_two_runs_with_room_for_one_finish_one_after_another(cluster, start):
    # A worker and its data take all CPUs. With data outside of the reservation, two runs would hold
    # a CPU each and wait for ever for the other's.
    cluster.add_node(num_cpus=2)
    runs = [start(1, pace=0.2, name=f"run-{number}") for number in range(2)]
    most_workers = 0
    deadline = time.monotonic() + 900
    while any(run.process.poll() is None for run in runs):
        assert time.monotonic() < deadline, [run.losses() for run in runs]
        most_workers = max(most_workers, len(workers()))
        time.sleep(1)
    for run in runs:
        assert run.process.returncode == 0, run.output()
        assert run.losses()
    assert most_workers == 1
