"""Workers and drivers that die: training goes on with the same losses."""

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
