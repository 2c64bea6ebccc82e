"""Searches over stored scores and over training runs."""

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import optuna
import pytest
import ray
import tiny
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from as2ray.distributed import tune
from as2ray.distributed.cluster import record_placement_group, release_placement_group
from as2ray.distributed.tune import search_scores, search_training
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import SearchError, TrainingError
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.tracking import (
    RunDescription,
    TrackingConfig,
    closing,
    create_servers,
)

IN_TURN = WorkersConfig(num_workers=0, cpus_per_worker=2)
"""Each trial trains in its own process, and takes all CPUs of the test's cluster."""

NUM_TRIALS = 15


def space(trial):
    trial.suggest_float("x", -1.0, 1.0)
    trial.suggest_categorical("power", [2, 4])


def numbered(trial):
    trial.suggest_float("x", 0.0, 1.0)
    return {"number": trial.number}


def search_sum(folder, seconds=0.0):
    def evaluate(params, data):  # Nested, so sent by value: Ray's processes cannot load this file.
        time.sleep(seconds)
        return {"distance": abs(params["x"]) ** params["power"] + data}

    return search_scores(evaluate, space, {"distance": "min"}, 1.0, folder, NUM_TRIALS)


def open_study(folder):
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    return optuna.load_study(study_name="search", storage=storage)


@pytest.fixture(scope="module")
def scores_search(ray_local, tmp_path_factory):
    """A search that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("search")
    handler = signal.getsignal(signal.SIGINT)
    results = search_sum(folder)
    assert signal.getsignal(signal.SIGINT) is handler
    return folder, results


def test_search_of_scores_leaves_a_study_a_table_and_plots(scores_search):
    folder, results = scores_search
    assert len(results) == NUM_TRIALS
    best = min(results, key=lambda result: result[1]["distance"])
    study = open_study(folder)
    assert study.metric_names == ["distance"]
    assert study.best_params == best[0]
    assert study.best_value == best[1]["distance"] >= 1.0
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["x"]) for row in rows] == [params["x"] for params, _ in results]
    assert {row["state"] for row in rows} == {"finished"}
    assert (folder / "search.md").read_text().count("\n") == NUM_TRIALS + 2
    assert {path.stem for path in folder.glob("*.png")} == {
        "search-history",
        "search-importance",
        "search-parallel",
    }
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum("scratch" not in path.parts for path in files) <= 10
    assert not os.environ.keys() & tune.TUNE_ENVIRONMENT.keys()


SCRIPT = """
import sys
import ray
sys.path[:0] = [{tests!r}, {tests!r} + "/distributed"]
from pathlib import Path
import test_tune
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
test_tune.search_sum(Path({folder!r}), seconds=0.3)
"""


def interrupt_search(folder, number, num_trials):
    """Ends the process of a search by a signal, once it has started some trials."""
    script = SCRIPT.format(tests=str(tiny.__file__).removesuffix("/tiny.py"), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    trials = folder / "scratch" / "trials.jsonl"
    deadline = time.monotonic() + 120
    while not trials.exists() or trials.read_text().count('finished"') < num_trials:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    return errors


@pytest.mark.slow
def test_interrupted_search_says_so_and_resumes_with_the_trials_of_a_whole_one(
    scores_search, tmp_path
):
    _, results = scores_search
    for number, num_trials in ((signal.SIGINT, 2), (signal.SIGTERM, 6)):
        errors = interrupt_search(tmp_path, number, num_trials)
        assert "interrupted after" in errors
        assert "run it again: it resumes" in errors
        assert not (tmp_path / "trials.csv").exists()
    num_before = len(open_study(tmp_path).trials)
    assert num_trials <= num_before < NUM_TRIALS
    # A trial that started after Tune's last snapshot, as after SIGKILL.
    open_study(tmp_path).ask()
    assert search_sum(tmp_path) == results
    assert len(open_study(tmp_path).trials) == NUM_TRIALS


def test_search_that_waits_for_resources_says_so(ray_local, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tune, "NO_PROGRESS_S", 0.5)

    @ray.remote(num_cpus=2)
    class Holder:
        def ready(self):
            return True

    holder = Holder.remote()
    ray.get(holder.ready.remote())
    threading.Timer(4.0, ray.kill, [holder]).start()
    with caplog.at_level("WARNING", logger=tune.__name__):
        assert len(search_sum(tmp_path)) == NUM_TRIALS
    assert "0 of 2 CPU are free, and each needs 1 CPU" in caplog.text


def test_group_of_a_run_whose_controller_was_killed_is_released(ray_local, tmp_path):
    @ray.remote(num_cpus=0)
    class Controller:
        def start_worker(self):
            group = placement_group([{"CPU": 1}])
            strategy = PlacementGroupSchedulingStrategy(group)
            worker = ray.remote(record_placement_group).options(scheduling_strategy=strategy)
            ray.get(worker.remote(tmp_path))
            return group

    controller = Controller.remote()
    group = ray.get(controller.start_worker.remote())
    ray.kill(controller)
    assert ray.util.placement_group_table(group)["state"] == "CREATED"
    for _ in range(2):
        release_placement_group(tmp_path)
        assert ray.util.placement_group_table(group)["state"] == "REMOVED"


@pytest.fixture
def job(corpus, checkpoint, tmp_path):
    dev = tiny.write_corpus(tmp_path / "dev", tiny.candidates(20, seed=7))
    return TrainingJob(
        ModelSpec(str(checkpoint()), max_length=32),
        (str(corpus),),
        {"dev": str(dev)},
        TrainingConfig(epochs=2, global_batch_size=64, learning_rate=3e-3, precision="fp32"),
        tracking=TrackingConfig(tensorboard=False),
    )


def create_jobs(job, *changes):
    """Returns `create_job` for the space `numbered`; the trials have these settings in turn."""

    def create_job(params):
        settings = changes[params["number"]]
        if settings is None:
            raise TrainingError("the loss is nan")
        return replace(job, training=replace(job.training, **settings))

    return create_job


@pytest.mark.slow
def test_trials_are_compared_by_epochs_and_failed_ones_are_named(job, tmp_path, ray_local, caplog):
    # 7 steps an epoch: the second trial is evaluated three times before the first was once.
    bad = {"learning_rate": 1e-9, "eval_steps": 2}
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracking = TrackingConfig(log_every_steps=1, mlflow_uri=uri, upload_rankers=False)
    job = replace(job, tracking=tracking, run=RunDescription("search", "Tiny", key="search"))
    create_job = create_jobs(job, {}, bad, None)
    servers, folder = create_servers(tracking, job.run), tmp_path / "search"
    with closing(servers), caplog.at_level("INFO", logger=tune.__name__):
        result = search_training(create_job, numbered, folder, IN_TURN, num_trials=3)
    assert [trial.state for trial in result.trials] == ["finished", "stopped", "failed"]
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("Tiny").experiment_id])
    runs = {run.info.run_name.partition("-")[0]: run for run in found}
    states = {name: run.info.status for name, run in runs.items()}
    assert states == {"search": "FINISHED", "001": "FINISHED", "002": "KILLED"}
    assert runs["001"].data.params["x"] == str(result.params["x"])
    assert runs["001"].data.metrics["dev/AP"] == result.value
    parents = {run.data.tags.get("mlflow.parentRunId") for run in found}
    assert parents == {None, runs["search"].info.run_id}
    assert [trial.epoch for trial in result.trials] == [2.0, 8 / 7, None]
    assert result.failed_trials == [3]
    assert result.params == result.trials[0].params
    assert result.value > result.trials[1].values["dev/AP"]
    assert (result.ranker / "model.safetensors").exists()
    lines = [record.getMessage() for record in caplog.records if record.name == tune.__name__]
    assert lines[0].startswith("trial 1/3 x 0.5488 number 0 -> dev/AP ")
    assert "(best so far)" in lines[0]
    assert lines[1].endswith("; stopped early at epoch 1.1")
    assert lines[2].endswith(": failed: TrainingError: the loss is nan")
    trials = sorted((tmp_path / "search" / "trials").iterdir())
    assert [trial.name[:3] for trial in trials] == ["001", "002"]
    [events] = trials[0].glob("tensorboard/*")
    assert all(name in events.read_bytes() for name in (b"hparams", b"train/loss", b"dev/AP"))


def test_trial_is_not_stopped_after_its_last_epoch(job, tmp_path, ray_local):
    create_job = create_jobs(job, {"epochs": 1}, {"epochs": 1, "learning_rate": 1e-9})
    result = search_training(create_job, numbered, tmp_path / "search", IN_TURN, num_trials=2)
    assert [(trial.state, trial.epoch) for trial in result.trials] == [("finished", 1.0)] * 2
    assert result.trials[0].values["dev/AP"] > result.trials[1].values["dev/AP"]


def test_search_without_a_finished_trial_fails(job, tmp_path, ray_local):
    create_job = create_jobs(job, None)
    with pytest.raises(SearchError, match=r"none of the 1 trials(.|\n)*fix: "):
        search_training(create_job, numbered, tmp_path / "search", IN_TURN, num_trials=1)


@pytest.mark.slow
def test_trial_starts_after_one_that_was_stopped_early_and_none_keeps_workers(
    job, tmp_path, ray_local
):
    # A worker and its share of data fill the cluster, which has no dashboard.
    create_job = create_jobs(job, {}, *[{"learning_rate": 1e-9}] * 2)
    result = search_training(
        create_job, numbered, tmp_path / "search", WorkersConfig(), num_trials=3
    )
    assert [trial.state for trial in result.trials] == ["finished", "stopped", "stopped"]
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}
