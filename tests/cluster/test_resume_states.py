"""A node that is about to be taken: the run saves its state, leaves, and goes on elsewhere."""

import json
import time

import pytest
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from running import workers

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

EPOCHS = 20
"""Of which the first few pass before the run learns that its node is to be taken."""


def test_run_leaves_a_node_that_is_drained_and_repeats_no_step(
    cluster, start, expected, monkeypatch
):
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.2")
    node = cluster.add_node(num_cpus=2)
    # By the clock, no state would be saved.
    run = start(EPOCHS, pace=0.2, resume_interval_s=600, preemption_check_steps=20)
    run.until(lambda: len(run.maps()) >= 1)
    deadline_ms = int((time.time() + 300) * 1000)
    is_accepted, _ = GcsClient(address=cluster.address).drain_node(
        node.node_id, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "spot", deadline_ms
    )
    assert is_accepted
    run.until(lambda: not workers())
    log = run.folder / "metrics.jsonl"
    *lines, last = [json.loads(line) for line in log.read_text().splitlines()]
    assert 25 < last["step"] < 25 * EPOCHS
    marked = [*lines, {**last, "marked": True}]
    log.write_text("".join(json.dumps(line) + "\n" for line in marked))
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=2)
    output = run.output()
    assert run.process.returncode == 0, output
    # A resumed run forgets the lines of steps that it repeats.
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert found[: len(marked)] == marked
    assert run.losses() == pytest.approx(expected(EPOCHS), abs=1e-4)
