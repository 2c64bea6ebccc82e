"""Searches over training runs."""

import signal
from dataclasses import replace

import pytest
import ray
import tiny

from as2ray.distributed import tune_run
from as2ray.distributed.trials import Trial
from as2ray.distributed.tune import search_training
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import DivergedError, SearchError, TrainingError
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.tracking import (
    METRICS,
    RunDescription,
    TrackingConfig,
    closing,
    create_servers,
    read_metrics,
)

IN_TURN = WorkersConfig(num_workers=0, cpus_per_worker=2)
"""Each trial trains in its own process, and takes all CPUs of the test's cluster."""


def numbered(trial):
    trial.suggest_float("x", 0.0, 1.0)
    return {"number": trial.number}


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
def test_trials_are_compared_by_epochs_and_failed_ones_are_named(
    job, tmp_path, ray_local, caplog, monkeypatch
):
    monkeypatch.setattr(tune_run, "MAX_TRIAL_FAILURES", 1)
    # 7 steps an epoch: the second trial is evaluated three times before the first was once.
    bad = {"learning_rate": 1e-9, "eval_steps": 2}
    short = {"learning_rate": 1e-9, "epochs": 1}  # as bad, but not stopped after its last epoch
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracking = TrackingConfig(log_every_steps=1, mlflow_uri=uri, upload_rankers=False)
    job = replace(job, tracking=tracking, run=RunDescription("search", "Tiny", key="search"))
    create_job = create_jobs(job, {}, bad, None, short)
    servers, folder = create_servers(tracking, job.run), tmp_path / "search"
    with closing(servers), caplog.at_level("INFO", logger=tune_run.__name__):
        result = search_training(create_job, numbered, folder, IN_TURN, num_trials=4)
    assert [trial.state for trial in result.trials] == ["finished", "stopped", "failed", "finished"]
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("Tiny").experiment_id])
    runs = {run.info.run_name.partition("-")[0]: run for run in found}
    states = {name: run.info.status for name, run in runs.items()}
    trial_states = {"001": "FINISHED", "002": "KILLED", "004": "FINISHED"}
    assert states == {"search": "FINISHED", **trial_states}
    assert runs["001"].data.params["x"] == str(result.params["x"])
    assert runs["001"].data.metrics["dev/AP"] == result.value
    parents = {run.data.tags.get("mlflow.parentRunId") for run in found}
    assert parents == {None, runs["search"].info.run_id}
    assert [trial.epoch for trial in result.trials] == [2.0, 8 / 7, None, 1.0]
    assert result.failed_trials == [3]
    assert all(trial.duration_s > 0.1 for trial in result.trials)
    assert result.params == result.trials[0].params
    for index in (1, 3):
        assert result.value > result.trials[index].values["dev/AP"]
    assert (result.ranker / "model.safetensors").exists()
    lines = [record.getMessage() for record in caplog.records if record.name == tune_run.__name__]
    assert lines[0].startswith("trial 1/4 x 0.5488 number 0 -> dev/AP ")
    assert "(best so far)" in lines[0]
    assert lines[1].endswith("; stopped early at epoch 1.1")
    [failure] = [line for line in lines if line.startswith("trial 3/4 ")]  # tried twice
    assert failure.endswith(": failed: TrainingError: the loss is nan")
    trials = sorted((tmp_path / "search" / "trials").iterdir())
    assert [trial.name[:3] for trial in trials] == ["001", "002", "004"]
    [events] = trials[0].glob("tensorboard/*")
    assert all(name in events.read_bytes() for name in (b"hparams", b"train/loss", b"dev/AP"))


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["dev/AP", "dev/P@1"])
def test_value_of_a_trial_is_that_of_the_checkpoint_that_it_keeps(job, tmp_path, ray_local, metric):
    create_job = create_jobs(job, {"select_by": "dev/P@1", "eval_steps": 1})
    args = {"num_trials": 1, "metric": metric}
    result = search_training(create_job, numbered, tmp_path / "search", IN_TURN, **args)
    lines = [line for line in read_metrics(result.run_folder / METRICS) if metric in line]
    highest = max(line["dev/P@1"] for line in lines)
    best = [line for line in lines if line["dev/P@1"] == highest]
    assert best[0]["dev/AP"] != best[-1]["dev/AP"]
    assert result.value == best[-1][metric]
    assert result.trials[0].values == {metric: result.value}


@pytest.mark.slow
def test_search_without_a_finished_trial_fails_and_a_diverged_one_is_not_repeated(
    tmp_path, ray_local
):
    def create_job(params):
        with (tmp_path / "attempts").open("a") as file:
            file.write("attempt\n")
        raise DivergedError("the loss is nan")

    with pytest.raises(SearchError, match=r"none of the 1 trials(.|\n)*fix: "):
        search_training(create_job, numbered, tmp_path / "search", IN_TURN, num_trials=1)
    assert (tmp_path / "attempts").read_text() == "attempt\n"


@pytest.mark.slow
def test_trial_that_is_stopped_early_keeps_no_workers(job, tmp_path, ray_local, monkeypatch):
    # A worker and its share of data fill the cluster, which has no dashboard: another trial would
    # wait for ever. The log has a line when a trial ends.
    states = {}

    def record_states(line):
        groups = ray.util.placement_group_table().values()
        of_workers = [group for group in groups if "CPU" in group["bundles"][0]]
        states[line.partition(" x ")[0]] = {group["state"] for group in of_workers}

    monkeypatch.setattr(tune_run.logger, "info", record_states)
    create_job = create_jobs(job, {}, {"learning_rate": 1e-9})
    result = search_training(
        create_job, numbered, tmp_path / "search", WorkersConfig(), num_trials=2
    )
    assert [trial.state for trial in result.trials] == ["finished", "stopped"]
    assert states == {"trial 1/2": {"REMOVED"}, "trial 2/2": {"REMOVED"}}


@pytest.mark.slow
def test_resumed_search_compares_with_trials_of_before_the_interruption(
    job, tmp_path, ray_local, monkeypatch
):
    create_job = create_jobs(job, {}, {"learning_rate": 1e-9})
    args = (create_job, numbered, tmp_path / "search", IN_TURN)
    with monkeypatch.context() as patch:
        patch.setattr(tune_run.logger, "info", lambda line: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt, match="after 1 of 2"):
            search_training(*args, num_trials=2)
    trials = search_training(*args, num_trials=2).trials
    assert [trial.state for trial in trials] == ["finished", "stopped"]


@pytest.mark.slow
def test_interrupted_search_ends_the_tracked_runs_of_its_trials(job, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    job = replace(job, tracking=TrackingConfig(tensorboard=False, mlflow_uri=uri))

    class Interrupted:
        """Ray Tune in a task that Ray cancels during a trial, whose process it kills."""

        def __init__(self, trainable, run_config, **settings):
            self.search = run_config.callbacks[0].search

        def fit(self):
            trial = Trial(1, {"number": 0}, "running", {}, 0.0, name="001")
            self.search.write_trial(trial)
            create_servers(job.tracking, self.search.trial_job(trial.name, trial.params).run)
            raise KeyboardInterrupt

    monkeypatch.setattr(tune_run.tune, "Tuner", Interrupted)
    with pytest.raises(KeyboardInterrupt, match="after 0 of 2"):
        search_training(create_jobs(job, {}), numbered, tmp_path / "search", IN_TURN, num_trials=2)
    client = mlflow.MlflowClient(uri)
    tracked = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert [(run.info.run_name, run.info.status) for run in tracked] == [("001", "KILLED")]
