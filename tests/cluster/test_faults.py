"""Nodes that are taken, lost or added, and drivers that die: a run goes on with the same losses."""

import json
import time
from pathlib import Path

import pytest
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from running import workers

from as2ray.checkpoints.loading import load
from as2ray.tables.parquet import ParquetTable
from as2ray.training.validation import EvalSet, validate

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TOLERANCE = 1e-4
"""Of the losses: a sum over other shares of a step rounds otherwise."""

STEPS, EPOCHS = 25, 10
"""Of the run whose node is drained: few epochs pass before, and some more until its driver is
killed."""

ELASTIC_EPOCHS = 20
"""Of the run that grows and shrinks: four seconds each, and Ray looks for nodes every twenty."""


def test_run_grows_with_a_node_that_comes_and_goes_on_without_one_that_is_lost(
    cluster, start, expected
):
    # First: while Ray keeps what a killed driver had reserved, no run that may grow starts.
    first = cluster.add_node(num_cpus=2)
    workers_config = {"num_workers": 2, "num_data_cpus": 2, "min_workers": 1}
    run = start(ELASTIC_EPOCHS, pace=4, elastic_resize_interval_s=1, **workers_config)
    run.until(lambda: len(run.maps()) >= 2)
    assert len(workers()) == 1
    second = cluster.add_node(num_cpus=2)
    run.until(lambda: len(workers()) == 2)
    grown = max(run.maps())
    run.until(lambda: max(run.maps()) > grown)
    cluster.remove_node(first, allow_graceful=False)
    lost = max(run.maps())
    # A run that began anew would have no MAP at all for a while.
    run.until(lambda: max(run.maps()) > lost and len(workers()) == 1)
    undisturbed = expected(ELASTIC_EPOCHS)
    losses = run.losses()
    assert losses == pytest.approx({step: undisturbed[step] for step in losses}, abs=TOLERANCE)
    cluster.remove_node(second)


def test_run_leaves_a_drained_node_without_a_step_twice_and_outlives_its_driver(
    cluster, start, arguments, expected, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.2")
    node = cluster.add_node(num_cpus=2)
    # By the clock, no state would be saved.
    plan = {
        "storage_path": str(tmp_path / "storage"),
        "resume_interval_s": 600,
        "preemption_check_steps": 20,
    }
    run = start(EPOCHS, pace=0.2, **plan)
    run.until(lambda: run.maps())
    deadline_ms = int((time.time() + 300) * 1000)
    is_accepted, _ = GcsClient(address=cluster.address).drain_node(
        node.node_id, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "spot", deadline_ms
    )
    assert is_accepted
    run.until(lambda: not workers())
    log = run.folder / "metrics.jsonl"
    *lines, last = [json.loads(line) for line in log.read_text().splitlines()]
    assert STEPS < last["step"] < STEPS * EPOCHS
    marked = [*lines, {**last, "marked": True}]
    log.write_text("".join(json.dumps(line) + "\n" for line in marked))
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=2)
    run.until(lambda: max(run.maps()) > last["step"])
    run.process.kill()
    run.process.wait()

    again = start(EPOCHS, pace=0.2, **plan)
    output = again.output()
    assert again.process.returncode == 0, output
    # A resumed run forgets the lines of steps that it repeats, and one that begins anew all lines.
    resumed = [json.loads(line) for line in log.read_text().splitlines()]
    assert resumed[: len(marked)] == marked
    assert again.losses() == pytest.approx(expected(EPOCHS), abs=TOLERANCE)
    ranker = load(Path(output.splitlines()[-1]), dtype="fp32")
    dev = {"dev": EvalSet.from_table(ParquetTable.open(arguments[2]).to_table(), ranker, 400)}
    assert validate(ranker, dev)["dev/AP"] == pytest.approx(max(again.maps().values()))
