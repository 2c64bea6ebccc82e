"""Nodes that come and go, workers and drivers that die: training goes on with the same losses."""

import json
from pathlib import Path

import pytest
from running import workers

from as2ray.checkpoints.loading import load
from as2ray.tables.parquet import ParquetTable
from as2ray.training.validation import EvalSet, validate

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TOLERANCE = 1e-4
"""Of the losses: a sum over other shares of a step rounds otherwise."""

EPOCHS = 25
"""Of the run that grows and shrinks: three seconds each, and Ray looks for nodes every twenty."""


def test_run_grows_with_a_node_that_comes_and_goes_on_without_one_that_is_lost(
    cluster, start, expected
):
    first = cluster.add_node(num_cpus=2)
    run = start(
        EPOCHS, pace=3, num_workers=2, num_data_cpus=2, min_workers=1, elastic_resize_interval_s=1
    )
    run.until(lambda: len(run.maps()) >= 2)
    assert len(workers()) == 1
    cluster.add_node(num_cpus=2)
    run.until(lambda: len(workers()) == 2)
    grown = max(run.maps())
    run.until(lambda: max(run.maps()) > grown)
    cluster.remove_node(first, allow_graceful=False)
    lost = max(run.maps())
    # A run that began anew would have no MAP at all for a while.
    run.until(lambda: max(run.maps()) > lost and len(workers()) == 1)
    undisturbed = expected(EPOCHS)
    found = run.losses()
    assert found == pytest.approx({step: undisturbed[step] for step in found}, abs=TOLERANCE)


def test_run_whose_worker_and_then_driver_are_killed_ends_as_if_they_had_lived(
    cluster, start, arguments, expected, tmp_path
):
    cluster.add_node(num_cpus=2)
    shared = str(tmp_path / "storage")
    run = start(8, pace=1, storage_path=shared)
    # By the third the first one's checkpoint is known to the controller.
    run.until(lambda: len(run.maps()) >= 3)
    [worker] = workers()
    lost = max(run.maps())
    worker.kill()
    run.until(lambda: max(run.maps()) > lost)
    run.process.kill()
    run.process.wait()
    told = run.folder / "metrics.jsonl"
    first, *rest = told.read_text().splitlines(keepends=True)
    marked = json.dumps({**json.loads(first), "marked": True}) + "\n"
    told.write_text("".join([marked, *rest]))
    again = start(8, pace=1, storage_path=shared)
    output = again.output()
    assert again.process.returncode == 0, output
    # A run that begins anew forgets what an earlier one told.
    assert told.read_text().startswith(marked)
    assert again.losses() == pytest.approx(expected(8), abs=TOLERANCE)
    ranker = load(Path(output.splitlines()[-1]), dtype="fp32")
    dev = {"dev": EvalSet.from_table(ParquetTable.open(arguments[2]).to_table(), ranker, 400)}
    assert validate(ranker, dev)["dev/AP"] == pytest.approx(max(again.maps().values()))
