import errno
import logging
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from pydantic import ValidationError
from training_runs import FunctionLoss, StopTrainingError, create_trainer

from as2ray.errors import ConfigError, TrainingError
from as2ray.progress import progress_values
from as2ray.training.checkpoint_store import BEST
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import (
    ConsoleTracker,
    JsonLinesTracker,
    MLflowTracker,
    RunDescription,
    TensorBoardTracker,
    Tracker,
    TrackingConfig,
    _TolerantTracker,
    calling_at_end,
    closing,
    create_servers,
    create_trackers,
    end_run,
    flatten,
    log_metrics,
    read_metrics,
    stage_name,
)
from as2ray.training.trainer import Trainer

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN = RunDescription(
    name="first-seed0",
    experiment="Tiny",
    key="store/TrainedRanker/abc",
    tags={"recipe": "Tiny", "seed": "0"},
    params={"training.epochs": 2},
)


def read_events(folder: Path):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return loading.EventAccumulator(str(folder)).Reload()


def test_json_lines_of_a_resumed_run_lose_what_came_after_and_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    tracker = JsonLinesTracker(path, resumed_step=1)
    tracker.log(2, {"loss": 2.5})
    tracker.close()
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]


def test_lines_told_before_are_kept_where_a_resumed_run_cannot_write(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n')

    def full(target, _):
        target.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        JsonLinesTracker(path, resumed_step=1)
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}]


def test_tensorboard_files_hold_the_scalars_of_a_running_run_and_settings_of_a_trial(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("as2ray.training.tracking.FLUSH_S", 0)
    tracker = TensorBoardTracker(tmp_path, 0, {"alpha": 0.5, "space": "a"})
    for step in (1, 2):
        tracker.log(step, {"train/loss": 1.0 / step, "train/loss/exit_4": 3.0})
    events = read_events(tmp_path)
    scalars = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars] == [(1, 1.0), (2, 0.5)]
    assert all(abs(event.wall_time - time.time()) < 600 for event in scalars)
    assert len(events.Scalars("train/loss/exit_4")) == 2
    assert events.PluginTagToContent("hparams")
    tracker.close()


def test_tensorboard_hides_the_points_of_a_run_that_was_killed_before_its_first_resume_state(
    tmp_path, monkeypatch
):
    killed = TensorBoardTracker(tmp_path, 0)
    for step in (1, 2, 3):
        killed.log(step, {"train/loss": 1.0})
    killed.flush()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60)  # The names of its files are seconds.
    again = TensorBoardTracker(tmp_path, 0)
    again.log(1, {"train/loss": 1.0})
    again.close()
    assert [event.step for event in read_events(tmp_path).Scalars("train/loss")] == [1]


def test_run_that_is_stopped_in_the_upload_of_its_ranker_is_in_tensorboard_and_resumes(
    checkpoint, corpus, tmp_path
):
    def create() -> Trainer:
        return create_trainer(
            checkpoint("bert", None),
            corpus,
            tmp_path / "run",
            epochs=1,
            max_steps=5,
            save_every_steps=4,
            tracking=TrackingConfig(),
        )

    class StoppedUpload(Tracker):
        def log_file(self, path: Path) -> None:
            assert (path / "model.safetensors").is_file()
            events = read_events(tmp_path / "run" / "tensorboard")
            assert events.Scalars("train/loss")[-1].step == 5
            raise StopTrainingError

    cut = create()
    cut.trackers.append(StoppedUpload())
    with pytest.raises(StopTrainingError):
        cut.fit()
    assert not (tmp_path / "run" / BEST).exists()
    again = create()
    assert again.state.global_step == 4
    again.fit()
    assert (tmp_path / "run" / BEST / "ranker").is_dir()


def test_resume_state_has_no_steps_that_tensorboard_lacks(checkpoint, corpus, tmp_path):
    trainer = create_trainer(
        checkpoint("bert", None),
        corpus,
        tmp_path / "run",
        epochs=1,
        max_steps=8,
        global_batch_size=4,
        save_every_steps=4,
        tracking=TrackingConfig(),
    )
    logged, save = [], trainer.checkpoint_store.save

    def save_and_read(folder: Path | None) -> None:
        save(folder)
        events = read_events(tmp_path / "run" / "tensorboard").Scalars("train/loss")
        logged.append([event.step for event in events])

    trainer.checkpoint_store.save = save_and_read
    trainer.fit()
    assert logged[0] == [1, 2, 3, 4]


def test_run_logs_into_the_three_groups_of_tensorboard(checkpoint, corpus, tmp_path):
    model = ModelSpec(str(checkpoint("bert", None)), max_length=32)
    training = TrainingConfig(epochs=1, global_batch_size=64, head_learning_rate=1e-3)
    files = RunDescription(folder=str(tmp_path / "stage"))
    job = TrainingJob(model, (str(corpus),), {"dev": str(corpus)}, training, run=files)
    train(job, tmp_path / "run")
    tags = set(read_events(tmp_path / "stage" / "tensorboard").Tags()["scalars"])
    assert {
        "train/loss",
        "train/gradient_norm",
        "train/learning_rate",
        "train/head_learning_rate",
        "speed/pairs_per_second",
        "speed/tokens_per_second",
        "speed/data_wait_s",
        "speed/batch_fill",
        "speed/host_memory_gb",
        "dev/AP",
        "dev/share_predicted_positive",
    } <= tags
    assert {tag.partition("/")[0] for tag in tags} == {"train", "speed", "dev", "epoch"}


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory) -> Path:
    """A database with MLflow's tables; making them takes 0.8 CPU seconds."""
    mlflow = pytest.importorskip("mlflow")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}")
    return path


@pytest.fixture
def tracked(empty_database, tmp_path) -> tuple[TrackingConfig, "MlflowClient"]:
    """Tracking with a database of its own, and what reads it."""
    from mlflow import MlflowClient

    (tmp_path / "mlflow").mkdir()
    uri = f"sqlite:///{shutil.copy(empty_database, tmp_path / 'mlflow')}"
    return TrackingConfig(tensorboard=False, mlflow_uri=uri), MlflowClient(uri)


def mlflow_runs(client, experiment="Tiny") -> dict:
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


@pytest.mark.slow
def test_mlflow_shows_runs_with_settings_trials_files_and_states(tracked, tmp_path):
    config, client = tracked
    trials = [RUN.trial(name, {"alpha": 0.5}) for name in ("001", "002", "003")]
    (tmp_path / "ranker").mkdir()
    (tmp_path / "ranker" / "weights").write_text("1")
    with closing([MLflowTracker(config.mlflow_uri, RUN)]):
        tracker = MLflowTracker(config.mlflow_uri, trials[0])
        with closing([tracker]):
            tracker.log(3, {"dev/AP": 0.5, "P@1": 0.25})
            tracker.log_file(tmp_path / "ranker")
        for trial, error in zip(trials[1:], (ValueError, KeyboardInterrupt)):
            with pytest.raises(error), closing([MLflowTracker(config.mlflow_uri, trial)]):
                raise error
    runs = mlflow_runs(client)
    states = {name: run.info.status for name, run in runs.items()}
    assert states == {
        "first-seed0": "FINISHED",
        "001": "FINISHED",
        "002": "FAILED",
        "003": "KILLED",
    }
    parent, trial = runs["first-seed0"], runs["001"]
    assert trial.data.metrics == {"dev/AP": 0.5, "P_at_1": 0.25}
    assert trial.data.params == {"training.epochs": "2", "alpha": "0.5"}
    assert trial.data.tags["recipe"] == "Tiny"
    assert trial.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert "mlflow.parentRunId" not in parent.data.tags
    assert [file.path for file in client.list_artifacts(trial.info.run_id)] == ["ranker"]
    # Not in the working directory, which is another one in every worker.
    assert (tmp_path / "mlflow" / "mlartifacts").is_dir()
    # The workers of a trial that was stopped are gone.
    MLflowTracker(config.mlflow_uri, trials[2])
    assert mlflow_runs(client)["003"].info.status == "RUNNING"
    end_run(config, trials[2], "KILLED")
    end_run(config, trials[0], "KILLED")  # It has finished.
    runs = mlflow_runs(client)
    assert (runs["003"].info.status, runs["001"].info.status) == ("KILLED", "FINISHED")


@pytest.mark.slow
def test_interrupted_run_continues_its_run_in_mlflow(tracked, checkpoint, corpus, tmp_path):
    config, client = tracked
    settings = {"epochs": 2, "global_batch_size": 64, "save_every_steps": 2}
    run = replace(RUN, key="")
    model = checkpoint("bert", None)
    cut = create_trainer(
        model, corpus, tmp_path / "run", tracking=config, run=run, stop_before=(1, 0), **settings
    )
    assert cut.batch_source.steps % 2, "the last step must be repeated"
    with pytest.raises(StopTrainingError):
        cut.fit()
    assert mlflow_runs(client)["first-seed0"].info.status == "FAILED"
    create_trainer(model, corpus, tmp_path / "run", tracking=config, run=run, **settings).fit()
    found = mlflow_runs(client)["first-seed0"]
    assert found.info.status == "FINISHED"
    steps = [m.step for m in client.get_metric_history(found.info.run_id, "train/loss")]
    assert steps == list(range(1, cut.batch_source.steps * 2 + 1))
    assert len(client.get_metric_history(found.info.run_id, "dev/AP")) == 2
    names = [file.path for file in client.list_artifacts(found.info.run_id, "ranker")]
    assert "ranker/model.safetensors" in names


@pytest.mark.slow
def test_run_goes_on_when_the_database_of_its_tracker_is_lost(tracked, tmp_path, caplog):
    config, _ = tracked
    [tracker] = create_servers(config, RUN)
    tracker.log(1, {"train/loss": 1.0})
    (tmp_path / "mlflow" / "mlflow.db").write_bytes(b"no database" * 1_000)
    with closing([tracker]):
        tracker.log(2, {"train/loss": 1.0})
        tracker.log(3, {"train/loss": 1.0})
    warnings = [r for r in caplog.records if "is not tracked any more" in r.getMessage()]
    assert len(warnings) == 1
    end_run(config, RUN, "FINISHED")


@pytest.mark.parametrize("uri", ["runs", "/data/mlruns", "file:///data/mlruns", "ftp://server"])
def test_folder_as_tracking_uri_is_refused_with_the_database_to_use(uri):
    with pytest.raises(ValidationError, match=r"write a database, sqlite:///.*mlflow\.db"):
        TrackingConfig(mlflow_uri=uri)


def test_relative_database_is_the_same_in_every_working_directory(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    assert TrackingConfig(mlflow_uri="sqlite:///a.db").mlflow_uri == f"sqlite:///{tmp_path}/a.db"
    absolute = TrackingConfig(mlflow_uri="sqlite:////data/a.db").mlflow_uri
    assert absolute == "sqlite:////data/a.db"


def test_relative_database_in_the_copy_of_a_job_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    absolute = f"sqlite:///{tmp_path}/runs.db"
    assert TrackingConfig(mlflow_uri=absolute).mlflow_uri == absolute
    with pytest.raises(ValidationError, match=r"sqlite:///runs\.db is in the job's copy"):
        TrackingConfig(mlflow_uri="sqlite:///runs.db")
    assert TrackingConfig(mlflow_uri="http://host:5000").mlflow_uri == "http://host:5000"


@pytest.mark.slow
def test_weights_and_biases_writes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = replace(RUN, folder=str(tmp_path / "stage"))
    (tmp_path / "report.md").write_text("Report")
    trackers = create_servers(TrackingConfig(tensorboard=False, wandb_project="tiny"), run)
    with closing(trackers):
        for tracker in trackers:
            tracker.log(3, {"dev/AP": 0.5})
            tracker.log_file(tmp_path / "report.md")
    [file] = (tmp_path / "stage" / "wandb").glob("offline-run-*/run-*.wandb")
    assert run.id in file.name
    texts = (b"first-seed0", b"training.epochs", b"dev/AP")
    deadline = time.monotonic() + 20  # Its own process writes the file.
    while not all(text in file.read_bytes() for text in texts):
        assert time.monotonic() < deadline, file.read_bytes()


@pytest.mark.slow
def test_weights_and_biases_has_one_whole_offline_run_of_an_interrupted_one(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = replace(RUN, folder=str(tmp_path / "stage"))
    config = TrackingConfig(tensorboard=False, wandb_project="tiny", log_every_steps=1)

    def files() -> list[Path]:
        return list((tmp_path / "stage" / "wandb").glob("offline-run-*/run-*.wandb"))

    first = create_trackers(config, tmp_path / "run", 0, 3, run)
    log_metrics(first, 1, {"dev/AP": 0.125})
    log_metrics(first, 2, {"dev/AP": 0.375})
    for tracker in first:
        tracker.close("KILLED")
    [killed] = files()
    while killed.parent.name[:27] == time.strftime("offline-run-%Y%m%d_%H%M%S"):
        time.sleep(0.1)  # The names of its folders are seconds.
    again = create_trackers(config, tmp_path / "run", 1, 3, run)
    with closing(again):
        log_metrics(again, 2, {"dev/AP": 0.625})
    [file] = files()
    deadline = time.monotonic() + 20
    while not all(value in file.read_bytes() for value in (b"0.125", b"0.625")):
        assert time.monotonic() < deadline, file.read_bytes()
    assert file != killed
    assert b"0.375" not in file.read_bytes()


def test_training_whose_loss_is_not_finite_stops_and_says_so(checkpoint, corpus, tmp_path):
    def broken(logits: torch.Tensor, targets: object) -> torch.Tensor:
        return logits.sum() * float("nan")

    with pytest.raises(TrainingError, match="loss is nan after 1 steps"):
        create_trainer(checkpoint("bert", None), corpus, tmp_path, loss=FunctionLoss(broken)).fit()


def test_training_in_fp16_is_refused_for_want_of_loss_scaling():
    with pytest.raises(ConfigError, match="fp16"):
        TrainingConfig(precision="fp16")


def test_nested_settings_have_dotted_names():
    settings = {"training": {"epochs": 3, "loss": {"alpha": 0.1}, "exits": [1, 2]}, "seed": None}
    assert flatten(settings) == {
        "training.epochs": 3,
        "training.loss.alpha": 0.1,
        "training.exits": [1, 2],
        "seed": None,
    }
    assert flatten({}) == {}


def test_run_of_an_experiment_has_the_name_of_its_stage():
    assert stage_name(Path("store/train/abc/scratch/run")) == "abc"
    assert stage_name(Path("runs/first")) == "first"
    assert stage_name(Path("other/run")) == "run"


@pytest.mark.parametrize(
    ("error", "state"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_end_of_a_run_is_told_as_it_was(error, state):
    states = []
    expected = nullcontext() if error is None else pytest.raises(error)
    with expected, calling_at_end(states.append):
        assert not states
        if error is not None:
            raise error
    assert states == [state]


def test_console_shows_losses_and_the_speed_in_tokens_and_what_is_left(caplog):
    metrics = {
        "train/loss": 0.51236,
        "dev/AP": 0.5,
        "speed/tokens_per_second": 3.0,
        "speed/data_wait_s": 1.0,
    }
    with caplog.at_level(logging.DEBUG):
        tracker = ConsoleTracker("first", 40, 2)
        tracker.started_at = time.monotonic() - 4  # two steps in four seconds
        tracker.log(4, metrics)
        tracker.close()
        tracker.close("FAILED")
        ConsoleTracker("second", 40, 0)
    assert caplog.messages == [
        "first continues after step 2 of 40",
        "first step 4/40, 1 min 12 s left  loss 0.5124  dev/AP 0.5  tokens_per_second 3",
        "first: complete",
        "first: failed",
    ]
    about = {"task": "first", "total": 40, "unit": "steps"}
    assert [progress_values(record) for record in caplog.records] == [
        {},
        {**about, "completed": 4, "metrics": metrics},
        {**about, "state": "complete"},
        {**about, "state": "failed"},
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "DEBUG", "DEBUG"]


def test_first_step_tells_how_long_all_of_them_take(caplog):
    tracker = ConsoleTracker("first", 11, 0)
    with caplog.at_level(logging.INFO):
        tracker.started_at = time.monotonic() - 2
        tracker.log(1, {})
        tracker.started_at = time.monotonic() - 2
        tracker.log(0, {})
    assert [message.split(",")[1].split(" left")[0] for message in caplog.messages] == [
        *(" 20 s", " 22 s"),
    ]


def test_run_is_named_by_its_folder_unless_it_has_a_name(tmp_path):
    folder = tmp_path / "abc" / "scratch" / "run"
    run = RunDescription().with_defaults(folder)
    assert (run.name, run.key, run.folder) == ("abc", str(folder), str(folder))
    assert (run.experiment, run.parent, run.is_reopened) == ("as2ray", "", False)
    given = replace(RUN, folder="files").with_defaults(folder)
    assert (given.name, given.key, given.folder) == (RUN.name, RUN.key, "files")
    assert len(run.id) == 16
    assert len({run.id, RUN.id, given.id, replace(RUN, key="other").id}) == 3


def test_trial_has_a_folder_and_a_key_below_those_of_its_search():
    search = replace(RUN, folder="stage")
    trial = search.trial("007", {"alpha": 0.5})
    assert (trial.name, trial.parent) == ("007", RUN.key)
    assert trial.key == "store/TrainedRanker/abc/007"
    assert trial.folder == str(Path("stage") / "trials" / "007")
    assert trial.hyperparameters == {"alpha": 0.5}
    assert (trial.tags, trial.params, trial.experiment) == (RUN.tags, RUN.params, "Tiny")


def test_run_has_a_console_and_a_file_and_tensorboard_where_it_is_asked_for(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 5}\n')
    run = replace(RUN, folder=str(tmp_path / "stage"), hyperparameters={"alpha": 0.5})
    plain = TrackingConfig(tensorboard=False)
    with caplog.at_level(logging.INFO):
        trackers = create_trackers(TrackingConfig(), tmp_path, 4, 9, run)
    kinds = [ConsoleTracker, JsonLinesTracker, TensorBoardTracker]
    assert [type(tracker) for tracker in trackers] == kinds
    assert caplog.messages == ["first-seed0 continues after step 4 of 9"]
    log_metrics(trackers, 6, {"train/loss": 1.0})
    with closing(trackers):
        pass
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1},
        {"step": 6, "train/loss": 1.0},
    ]
    events = read_events(tmp_path / "stage" / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(6, 1.0)]
    assert events.PluginTagToContent("hparams")
    trackers = create_trackers(plain, tmp_path / "other", 0, 9)
    assert [type(tracker) for tracker in trackers] == kinds[:2]
    assert trackers[0].name == "other"
    assert (tmp_path / "other" / "metrics.jsonl").is_file()
    assert create_servers(plain, RUN) == []


class LostServer(Tracker):
    """Notes what it is called with, and does not answer from a step on."""

    def __init__(self, last_step: int) -> None:
        self.calls, self.last_step = [], last_step

    def log(self, step, metrics):
        self.calls.append((step, metrics))
        if step > self.last_step:
            raise ConnectionError("no answer")

    def log_file(self, path):
        self.calls.append(path)

    def close(self, state="FINISHED"):
        self.calls.append(state)


def test_server_that_does_not_answer_is_left_alone(caplog):
    lost, answering = LostServer(1), LostServer(9)
    for server in (lost, answering):
        tracker = _TolerantTracker(server)
        for step in (1, 2, 3):
            tracker.log(step, {"loss": 1.0})
        tracker.log_file(Path("report.md"))
        tracker.close("FAILED")
    steps = [(step, {"loss": 1.0}) for step in (1, 2, 3)]
    assert lost.calls == steps[:2]
    assert answering.calls == [*steps, Path("report.md"), "FAILED"]
    assert caplog.messages == ["the run goes on, and is not tracked any more: no answer"]


def test_error_while_one_tracker_ends_does_not_keep_the_others_open():
    class Broken(LostServer):
        def close(self, state="FINISHED"):
            raise OSError("full")

    first, last = LostServer(0), LostServer(0)
    with pytest.raises(OSError, match="full"), closing([first, Broken(0), last]):
        pass
    assert (first.calls, last.calls) == (["FAILED"], ["FINISHED"])


def test_tracker_whose_package_is_missing_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr("as2ray.training.tracking.find_spec", lambda _: None)
    for settings, package in (
        ({"mlflow_uri": "sqlite:///a.db"}, r"mlflow: pip install 'as2ray\[tracking\]'"),
        ({"wandb_project": "tiny"}, r"wandb: pip install 'as2ray\[wandb\]'"),
    ):
        with pytest.raises(ValidationError, match=f"needs the package {package}"):
            TrackingConfig(**settings)
