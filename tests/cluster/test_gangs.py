"""Runs that want more than the cluster has finish one after another."""

import pytest
from ray.cluster_utils import Cluster
from running import Run, Task, ended_tasks

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def expect_one_after_another(cluster: Cluster, runs: list[Run]) -> list[Task]:
    """Workers of a run start when those of the run before have done their work.

    Returns the tasks of these runs.
    """
    for run in runs:
        output = run.output()
        assert run.process.returncode == 0, output
    tasks = ended_tasks(cluster)
    jobs = sorted({task.job for task in tasks})[-len(runs) :]
    tasks = [task for task in tasks if task.job in jobs]
    spans = []
    for job in jobs:
        training = [x for x in tasks if x.job == job and x.name.startswith("RayTrainWorker.")]
        spans.append((min(x.started_at for x in training), max(x.ended_at for x in training)))
    (_, first_end), (second_start, _) = sorted(spans)
    assert first_end <= second_start
    return tasks


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
    tasks = expect_one_after_another(cluster, runs)
    for run in runs:
        assert run.losses() == pytest.approx(losses, rel=1e-4)
    assert {x.node_id for x in tasks if "_pack_windows" in x.name} == {nodes[0].node_id}
    for node in nodes:
        cluster.remove_node(node)


def test_two_runs_with_room_for_one_finish_one_after_another(cluster, start):
    # A worker and its data take all CPUs. With data outside of the reservation, two runs would hold
    # a CPU each and wait for ever for the other's.
    cluster.add_node(num_cpus=2)
    runs = [start(1, pace=0.2, name=f"run-{number}") for number in range(2)]
    expect_one_after_another(cluster, runs)
    for run in runs:
        assert run.losses()
