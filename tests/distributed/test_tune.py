"""Searches over stored scores."""

import csv
import json
import logging
import os
import pickle
import signal
import threading
import time
from types import SimpleNamespace

import optuna
import pytest
import ray
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from ray.train import WorkerGroupError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from as2ray.distributed import tune_run
from as2ray.distributed.cluster import record_placement_group, release_placement_group
from as2ray.distributed.trials import Trial
from as2ray.distributed.tune import search_scores
from as2ray.errors import TrainingError

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


def interrupt_search(folder, number, num_trials):
    """Ends a search of this process by a signal, once it has ended some trials."""
    trials = folder / "scratch" / "trials.jsonl"

    def send() -> None:
        deadline = time.monotonic() + 900
        while not trials.exists() or trials.read_text().count('finished"') < num_trials:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        search_sum(folder, seconds=0.3)
    sender.join()
    return str(interrupt.value)


@pytest.mark.slow
def test_interrupted_search_says_so_and_resumes_with_the_trials_of_a_whole_one(
    scores_search, tmp_path, caplog, monkeypatch
):
    _, results = scores_search
    analysis = logging.getLogger("ray.tune.analysis")
    # As in a process without an earlier search.
    monkeypatch.setattr(analysis, "level", logging.WARNING)
    monkeypatch.setattr(analysis, "handlers", [caplog.handler])
    for number, num_trials in ((signal.SIGINT, 2), (signal.SIGTERM, 6)):
        message = interrupt_search(tmp_path, number, num_trials)
        assert "interrupted after" in message
        assert "run it again: it resumes" in message
        assert not (tmp_path / "trials.csv").exists()
        analysis.setLevel(logging.WARNING)
    num_before = len(open_study(tmp_path).trials)
    assert num_trials <= num_before < NUM_TRIALS
    # A trial that started after Tune's last snapshot, as after SIGKILL.
    open_study(tmp_path).ask()
    assert search_sum(tmp_path) == results
    assert len(open_study(tmp_path).trials) == NUM_TRIALS
    assert not any(record.name.startswith(analysis.name) for record in caplog.records)


def test_duration_of_a_trial_counts_what_an_interrupted_search_did(tmp_path):
    search = tune_run.TuneRun(tmp_path, {"distance": "min"}, 2)
    search.scratch.mkdir()
    search.write_trial(Trial(1, {"x": 0.5}, "finished", {"distance": 0.25}, duration_s=20.0))
    search.write_trial(Trial(2, {"x": 0.1}, "finished", {"distance": 0.5}, duration_s=30.0))
    log = tune_run._RunLog(search, None)
    # The second one was proposed anew: the study knows the first alone.
    for number, params in ((1, {"x": 0.5}), (2, {"x": 0.7})):
        trial = ray.tune.experiment.Trial("", config=params, stub=True)
        trial.experiment_tag = f"{number}_x={params['x']}"
        trial.run_metadata.last_result = {"distance": 0.25, "finished": True, "time_total_s": 1.5}
        log.on_trial_start(1, [], trial)  # Tune restores what it knew of the run before
        log.on_trial_complete(1, [], trial)
    states = [json.loads(line) for line in (search.scratch / "trials.jsonl").open()]
    assert [each["duration_s"] for each in states[2:]] == [20.0, 21.5, 0.0, 1.5]
    assert [trial.duration_s for trial in search.read_trials()] == [21.5, 1.5]


@pytest.mark.slow
def test_interrupted_search_in_a_folder_that_was_moved_goes_on_there(scores_search, tmp_path):
    _, results = scores_search
    interrupt_search(tmp_path / "before", signal.SIGINT, 2)
    (tmp_path / "before").rename(tmp_path / "after")
    assert search_sum(tmp_path / "after") == results
    assert not (tmp_path / "before").exists()


def test_search_that_waits_for_resources_says_so(ray_local, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tune_run, "NO_PROGRESS_S", 0.5)

    @ray.remote(num_cpus=2)
    class Holder:
        def ready(self):
            return True

    holder = Holder.remote()
    ray.get(holder.ready.remote())

    latest = threading.Timer(120.0, ray.kill, [holder])
    latest.start()

    def release(record):
        if record.name == tune_run.__name__:
            ray.kill(holder)
        return True

    caplog.handler.addFilter(release)
    try:
        with caplog.at_level("WARNING", logger=tune_run.__name__):
            assert len(search_sum(tmp_path)) == NUM_TRIALS
    finally:
        caplog.handler.removeFilter(release)
        latest.cancel()
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


def test_trial_that_failed_in_its_workers_says_what_happened_there(tmp_path):
    failures = {1: TrainingError("another loss"), 0: TrainingError("the loss is nan", fix="lower")}
    for error in (WorkerGroupError("Training failed due to worker errors:", failures), failures[0]):
        (tmp_path / "error.pkl").write_bytes(pickle.dumps(error))
        trial = SimpleNamespace(pickled_error_file=str(tmp_path / "error.pkl"))
        assert tune_run._describe_error(trial) == "TrainingError: the loss is nan"
    trial = SimpleNamespace(pickled_error_file=None, error_file="search/error.txt")
    assert tune_run._describe_error(trial).endswith("see search/error.txt")
