"""Searches over stored scores."""

import csv
import os
import signal
import subprocess
import sys
import threading
import time

import optuna
import pytest
import ray
import tiny
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from as2ray.distributed import tune_run
from as2ray.distributed.cluster import record_placement_group, release_placement_group
from as2ray.distributed.tune import search_scores

NUM_TRIALS = 15


def space(trial):
    trial.suggest_float("x", -1.0, 1.0)
    trial.suggest_categorical("power", [2, 4])


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
    assert not os.environ.keys() & tune_run.TUNE_ENVIRONMENT.keys()


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
    deadline = time.monotonic() + 900
    while not trials.exists() or trials.read_text().count('finished"') < num_trials:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=900)
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
    monkeypatch.setattr(tune_run, "NO_PROGRESS_S", 0.5)

    @ray.remote(num_cpus=2)
    class Holder:
        def ready(self):
            return True

    holder = Holder.remote()
    ray.get(holder.ready.remote())
    threading.Timer(4.0, ray.kill, [holder]).start()
    with caplog.at_level("WARNING", logger=tune_run.__name__):
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
