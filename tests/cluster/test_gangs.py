"""Runs that want more than the cluster has finish one after another."""

import time

import pytest
from running import workers

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_three_runs_with_room_for_one_finish_one_after_another(cluster, start):
    # A worker and its data take all CPUs. With data outside of the reservation, two runs would hold
    # a CPU each and wait for ever for the other's.
    cluster.add_node(num_cpus=2)
    runs = [start(1, pace=0.2, name=f"run-{number}") for number in range(3)]
    most_workers = 0
    deadline = time.monotonic() + 480
    while any(run.process.poll() is None for run in runs):
        assert time.monotonic() < deadline, [run.losses() for run in runs]
        most_workers = max(most_workers, len(workers()))
        time.sleep(0.5)
    for run in runs:
        assert run.process.returncode == 0, run.output()
        assert run.losses()
    assert most_workers == 1
