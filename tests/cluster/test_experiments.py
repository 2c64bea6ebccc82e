"""Experiments on several nodes: side by side, after lost processes and nodes, queued fairly."""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import sleeping_stages
import tiny
from sleeping_stages import Cell, Closing, Failing, KilledOnce, runs, start_times

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import TrainingError
from as2ray.experiments.cost_model import Cost
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.ray_backend import RayBackend
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec
from as2ray.experiments.store import Store
from as2ray.losses.distillation import DistillationLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig
from benchmarks.plan import simulate
from pipelines import transfer_adapt

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


SECONDS = 1.0
"""Duration of a cell's work, which needs no CPU: one machine plays all nodes."""


def count_rounds(started_at: Sequence[float]) -> int:
    """Length of the longest chain of cells of which each starts after the one before has ended.

    Unlike the duration of a schedule it does not grow with the load of the machine.
    """
    rounds: list[int] = []
    for start in started_at:
        ended = [r for r, earlier in zip(rounds, started_at) if earlier + SECONDS <= start]
        rounds.append(1 + max(ended, default=0))
    return max(rounds)


def connect(cluster):
    """Makes this process a driver, whose tasks see the stages of tests."""
    folders = [str(Path(sleeping_stages.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        "env_vars": {"PYTHONPATH": os.pathsep.join(folders)},
        "worker_process_setup_hook": "sleeping_stages.skip_published_counts",
    }
    ray.init(address=cluster.address, logging_level="ERROR", runtime_env=environment)


@pytest.fixture(scope="module")
def nodes(cluster):
    """Four nodes of one CPU each, and a head without any; this process is connected."""
    while len(cluster.worker_nodes) < 4:
        cluster.add_node(num_cpus=1, object_store_memory=10**8)
    connect(cluster)
    yield cluster
    ray.shutdown()


@pytest.fixture
def log(tmp_path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def run_on_ray(folder, *targets, max_parallel=8, workers=None):
    store = Store(str(folder))
    return run_graph(targets, store, RayBackend(store, workers or WorkersConfig(), max_parallel))


def contents(folder):
    return {p.parent.name: p.read_bytes() for p in Path(folder).rglob("numbers.npy")}


def test_table_gets_faster_with_nodes_as_simulated(cluster, tmp_path):
    class WorkingCell(Cell):
        RESOURCES = "device"

    def cell(name, *after):
        log.mkdir(exist_ok=True)
        return WorkingCell(name, after, SECONDS, str(log), expected_hours=SECONDS)

    measured, simulated = {}, {}
    connect(cluster)
    try:
        for num_nodes in (1, 2, 4):
            while len(cluster.worker_nodes) < num_nodes:
                cluster.add_node(num_cpus=1, object_store_memory=10**8)
            backend = RayBackend(Store(str(tmp_path / "store")), WorkersConfig(), 16)
            log = tmp_path / f"log-{num_nodes}"
            warm = [WorkingCell(f"warm-{num_nodes}-{n}", seconds=SECONDS) for n in range(num_nodes)]
            run_graph(warm, backend.store, backend)
            first = cell(f"first-{num_nodes}")
            rows = [cell(f"row-{num_nodes}-{n}", first) for n in range(8)]
            stages = [first, *rows, cell(f"last-{num_nodes}", rows[0])]
            run_graph(stages, backend.store, backend).raise_failures({})
            measured[num_nodes] = count_rounds(start_times(log)) * SECONDS
            costs = {stage: Cost(None, stage.hours(), fixed_hours=0.0) for stage in stages}
            simulated[num_nodes] = simulate(costs, num_nodes, gang_size=1)
    finally:
        ray.shutdown()
    assert simulated == {1: 10 * SECONDS, 2: 6 * SECONDS, 4: 4 * SECONDS}
    assert measured[1] > measured[2] > measured[4]
    for num_nodes, duration_s in measured.items():
        assert 0 <= duration_s - simulated[num_nodes] <= SECONDS, (measured, simulated)


def test_cells_on_four_nodes_run_side_by_side_and_equal_those_in_sequence(nodes, tmp_path, log):
    # Each waits for three others that run at the same time. Durations would depend on the load.
    first = Cell("first")
    cells = [Cell(f"cell-{number}", (first,), log=str(log), meet=4) for number in range(6)]
    run_on_ray(tmp_path / "parallel", *cells).raise_failures({})
    assert sorted(runs(log)) == [cell.name for cell in cells]
    store = Store(str(tmp_path / "sequence"))
    run_graph(cells, store, SequentialBackend(store, WorkersConfig(num_workers=0)))
    assert contents(tmp_path / "parallel") == contents(tmp_path / "sequence")


def test_stage_whose_process_dies_is_started_again_and_resumes(nodes, tmp_path):
    stage = KilledOnce("killed")
    assert run_on_ray(tmp_path / "store", stage).results[stage].outputs["first"] >= 0


def test_error_of_a_stage_is_raised_as_itself_and_others_go_on(nodes, tmp_path):
    run = run_on_ray(tmp_path / "store", Failing("no good"), Cell("good"))
    assert len(run.results) == 1
    with pytest.raises(TrainingError, match="no good"):
        run.raise_failures({})


def test_interrupted_stages_end_themselves(nodes, tmp_path, log):
    # A shell's background processes, such as this one may be, ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cells = [Closing(f"cell-{number}", log=str(log), meet=3) for number in range(2)]

    def interrupt():
        deadline = time.monotonic() + 900
        while len(runs(log)) < len(cells):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_ray(tmp_path / "store", *cells)
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)
    assert len(list((tmp_path / "store").rglob("closed"))) == len(cells)


def test_tasks_of_ray_data_need_no_room_for_training_workers(nodes, tmp_path):
    class Data(Cell):
        RESOURCES = "data"

    # More CPUs than a node has: its tasks are spread over all nodes.
    workers = WorkersConfig(num_workers=4, cpus_per_worker=1.0, num_data_cpus=3.0)
    backend = RayBackend(Store(str(tmp_path / "store")), workers, 8)
    small, data = Cell("small"), Data("data")
    backend.check([data])
    assert backend.admits(data, [small])
    assert not backend.admits(data, [small, small])  # 3 CPUs of 4 are wanted


@pytest.fixture
def recipe(checkpoint, tmp_path, monkeypatch):
    """A teacher and its student."""
    for split, seed, questions in (("train", 0, 40), ("dev", 1, 10), ("test", 2, 12)):
        tiny.write_wikiqa(tmp_path / "data" / "wikiqa", split, seed, questions)
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("as2ray.corpora.corpus.Corpus.check_counts", lambda *_: False)
    training = TrainingConfig(epochs=1, global_batch_size=16, learning_rate=1e-3, precision="fp32")
    return Recipe(
        title="Tiny",
        model=ModelSpec(str(checkpoint("bert", None)), max_length=32),
        tables={split: TableSpec("wikiqa", split) for split in ("train", "dev", "test")},
        dev="dev",
        tests=["test"],
        runs={
            "first": RunSpec(["train"], training),
            "student": RunSpec(
                ["train"], training, num_layers=1, teachers=["first"], loss=DistillationLoss()
            ),
        },
        baseline="first",
        seeds=[0],
        tracking=TrackingConfig(tensorboard=False),
    )


def test_recipe_on_nodes_trains_what_the_store_has_not_and_equals_one_process(
    nodes, recipe, tmp_path
):
    here, there = tmp_path / "here" / "out", tmp_path / "there" / "out"
    alone = WorkersConfig(num_workers=0)
    transfer_adapt.PIPELINE.run(recipe, here, alone)
    smaller = replace(recipe, runs={"first": recipe.runs["first"]})
    transfer_adapt.PIPELINE.run(smaller, tmp_path / "there" / "smaller", alone)
    manifests = tmp_path / "there" / "store" / "TrainedRanker"
    first = {path: path.stat().st_mtime_ns for path in manifests.glob("*/manifest.json")}
    workers = WorkersConfig(num_workers=1, cpus_per_worker=0.5, num_data_cpus=0.5)
    transfer_adapt.PIPELINE.run(recipe, there, workers)
    both = {path: path.stat().st_mtime_ns for path in manifests.glob("*/manifest.json")}
    assert (len(first), len(both)) == (1, 2)
    assert first.items() <= both.items()
    assert (there / "test.json").read_bytes() == (here / "test.json").read_bytes()
    for run in recipe.runs:
        for file in (
            "rankers/{}-seed0/ranker/model.safetensors",
            "evaluations/{}-seed0-test/ranking.run",
        ):
            path = file.format(run)
            assert (there / path).read_bytes() == (here / path).read_bytes(), path
    links = [json.loads((output / "stages.json").read_text()) for output in (here, there)]
    assert links[0] == links[1]
