"""Trackers, which log a run to the console, to files, and to MLflow or Weights & Biases."""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, PositiveInt, field_validator
from pydantic.dataclasses import dataclass as validated_dataclass

from as2ray.progress import fields, format_duration
from as2ray.tables.atomic import atomic_file
from as2ray.training.checkpoint_store import Metrics

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""File in a run's folder with a line for each report."""

FLUSH_S = 5
"""Seconds after which TensorBoard's files are written with the next report."""

RunState = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ended; a run that was killed, or is about to lose its node, may be resumed."""

JOB_FOLDER = "working_dir_files"
"""Folder in which Ray unpacks the working directories of jobs."""

MLFLOW_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")


def is_in_job_copy(path: str | Path) -> bool:
    """Returns whether a path lies in Ray's copy of the working directory of a job."""
    return JOB_FOLDER in Path(path).absolute().parts


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrackingConfig:
    """How a run is tracked. Changes nothing of its result."""

    log_every_steps: PositiveInt = 10
    """Steps between two reports of losses, learning rates, speed and memory."""
    tensorboard: bool = True
    """Write TensorBoard files into the run's folder."""
    mlflow_uri: str | None = None
    """Tracking URI of MLflow: a server, or a database such as `sqlite:///mlflow.db`."""
    wandb_project: str | None = None
    """Project of Weights & Biases; `WANDB_MODE=offline` writes into the run's folder."""
    upload_rankers: bool = True
    """Store the selected ranker in MLflow or Weights & Biases, too."""

    @field_validator("mlflow_uri")
    @classmethod
    def _check_mlflow_uri(cls, uri: str | None) -> str | None:
        if uri is None:
            return None
        scheme, has_scheme, path = uri.partition("://")
        if uri != "databricks" and (
            not has_scheme or scheme.partition("+")[0] not in MLFLOW_SCHEMES
        ):
            folder = Path(uri.removeprefix("file:")).absolute()
            raise ValueError(
                f"MLflow keeps no runs in the folder {uri!r}; write a database, "
                f"sqlite:///{folder / 'mlflow.db'}, or the http:// address of a server"
            )
        _check_installed("mlflow", "tracking")
        if scheme != "sqlite":
            return uri
        database = Path(path[1:]).absolute()  # Workers of Ray have another working directory.
        if is_in_job_copy(database):
            raise ValueError(
                f"{uri} is in the job's copy of its working directory, which Ray does not keep; "
                "write an absolute path after sqlite:///"
            )
        return f"sqlite:///{database}"

    @field_validator("wandb_project")
    @classmethod
    def _check_wandb(cls, project: str | None) -> str | None:
        if project is not None:
            _check_installed("wandb", "wandb")
        return project


def _check_installed(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ValueError(f"needs the package {package}: pip install 'as2ray[{extra}]'")


@dataclass(frozen=True)
class RunDescription:
    """What trackers show of a run besides its metrics."""

    name: str = ""
    """Name of the run; by default that of its folder."""
    experiment: str = "as2ray"
    """Runs of the same experiment are shown together."""
    key: str = ""
    """Tells the run from all others, so that a retry continues it; by default its folder."""
    parent: str = ""
    """Key of the search that the run is a trial of."""
    folder: str = ""
    """Folder of the files of TensorBoard and Weights & Biases; by default the run's own."""
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run, by dotted names."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the search chose for this trial."""
    is_reopened: bool = False
    """Whether a run that has finished is continued, too."""

    @property
    def id(self) -> str:
        """A short form of the key."""
        return sha256(self.key.encode()).hexdigest()[:16]

    def with_defaults(self, folder: Path) -> "RunDescription":
        """Returns the description with what follows from the folder of the run."""
        name, key = self.name or stage_name(folder), self.key or str(folder)
        return replace(self, name=name, key=key, folder=self.folder or str(folder))

    def trial(self, name: str, params: Mapping[str, Any]) -> "RunDescription":
        """Returns the description of a trial of this search."""
        return replace(
            self,
            name=name,
            key=f"{self.key}/{name}",
            parent=self.key,
            folder=str(Path(self.folder) / "trials" / name),
            hyperparameters=dict(params),
        )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted names, such as `training.epochs`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


class Tracker:
    """Logs a run."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Logs the metrics after `step` steps."""

    def flush(self) -> None:
        """Writes what is buffered: a resumed run does not log it again."""

    def log_file(self, path: Path) -> None:
        """Stores a file or a folder, if the tracker keeps files."""

    def close(self, state: RunState = "FINISHED") -> None:
        """Writes what is buffered and ends the log."""


class ConsoleTracker(Tracker):
    """Writes one line per report to Python's logging; it leaves out most metrics of speed.

    Args:
        name: Name of the run.
        num_steps: Number of steps of the run.
        resumed_step: Number of steps of the checkpoint from which the run resumes, or 0.
    """

    def __init__(self, name: str, num_steps: int, resumed_step: int) -> None:
        self.name, self.num_steps, self.resumed_step = name, num_steps, resumed_step
        self.started_at = time.monotonic()
        if resumed_step:
            logger.info("%s continues after step %d of %d", name, resumed_step, num_steps)
        self._about = {"task": name, "total": num_steps, "unit": "steps"}

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        step_s = (time.monotonic() - self.started_at) / max(1, step - self.resumed_step)
        left = format_duration(step_s * (self.num_steps - step))
        shown = {
            name.removeprefix("train/").removeprefix("speed/"): value
            for name, value in metrics.items()
            if name == "speed/tokens_per_second" or not name.startswith("speed/")
        }
        values = "  ".join(f"{key} {value:.4g}" for key, value in shown.items())
        logger.info(
            *("%s step %d/%d, %s left  %s", self.name, step, self.num_steps, left, values),
            extra=fields(**self._about, completed=step, metrics=dict(metrics)),
        )

    def close(self, state: RunState = "FINISHED") -> None:
        """See `Tracker`; a bar ends with its run."""
        ended = {"FINISHED": "complete", "FAILED": "failed", "KILLED": "interrupted"}[state]
        logger.debug("%s: %s", self.name, ended, extra=fields(**self._about, state=ended))


class JsonLinesTracker(Tracker):
    """Writes one JSON object per report and line.

    Args:
        path: The file. Its lines after `resumed_step` are removed.
        resumed_step: Number of steps of the checkpoint from which the run resumes, or 0.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        lines = [line for line in read_metrics(path) if line["step"] <= resumed_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._file = path.open("a")

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self, state: RunState = "FINISHED") -> None:
        """See `Tracker`."""
        self._file.close()


class TensorBoardTracker(Tracker):
    """Writes scalars for TensorBoard.

    Args:
        folder: Folder of the event files.
        resumed_step: Number of steps of the checkpoint from which the run resumes, or 0. Later
            points of the interrupted run are hidden.
        hyperparameters: Settings of a trial, which TensorBoard's HPARAMS page compares.
        metric: The metric by which it compares them.
    """

    def __init__(
        self,
        folder: Path,
        resumed_step: int,
        hyperparameters: Mapping[str, Any] | None = None,
        metric: str = "dev/AP",
    ) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import hparams

        folder.mkdir(parents=True, exist_ok=True)
        # `SummaryWriter` has a thread that writes later, and cannot wait for it.
        self._writer = EventsWriter(str(folder / "events"))
        self._flushed_at = -math.inf
        start = SessionLog(status=SessionLog.START)
        self._write(step=resumed_step + 1, session_log=start)
        for summary in hparams(hyperparameters, {metric: None}) if hyperparameters else ():
            self._write(summary=summary)

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        from tensorboardX.proto.summary_pb2 import Summary

        # One event for all metrics takes a tenth of the time of one for each.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))
        if time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """See `Tracker`."""
        self._writer.flush()
        self._flushed_at = time.monotonic()

    def close(self, state: RunState = "FINISHED") -> None:
        """See `Tracker`."""
        self._writer.close()

    def _write(self, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), **content))


class MLflowTracker(Tracker):
    """Logs to MLflow; continues the run of an earlier attempt, whose steps are kept.

    Args:
        uri: Tracking URI.
        run: What to show of the run.
    """

    def __init__(self, uri: str, run: RunDescription) -> None:
        from mlflow.entities import Param

        self._client, experiment_id = _open_mlflow(uri, run.experiment)
        run_id = _find_mlflow_run(self._client, experiment_id, run)
        self._last_steps: dict[str, int] = {}
        if run_id is None:
            tags = {**run.tags, "as2ray.key": run.id}
            parent = replace(run, key=run.parent)
            if run.parent and (id := _find_mlflow_run(self._client, experiment_id, parent)):
                tags["mlflow.parentRunId"] = id
            created = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
            run_id = created.info.run_id
            params = {**run.params, **run.hyperparameters}
            self._client.log_batch(
                run_id, params=[Param(name, str(value)[:6_000]) for name, value in params.items()]
            )
        else:
            self._client.update_run(run_id, status="RUNNING")
            for name in self._client.get_run(run_id).data.metrics:
                history = self._client.get_metric_history(run_id, name)
                self._last_steps[name] = max(metric.step for metric in history)
        self._run_id: str = run_id

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1_000)
        # MLflow does not allow `@` in names.
        entries = [
            Metric(k.replace("@", "_at_"), float(v), now_ms, step) for k, v in metrics.items()
        ]
        # It cannot delete the steps after a resume state, which a resumed run repeats.
        entries = [entry for entry in entries if step > self._last_steps.get(entry.key, -1)]
        self._client.log_batch(self._run_id, metrics=entries)

    def log_file(self, path: Path) -> None:
        """See `Tracker`."""
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), path.name)
        else:
            self._client.log_artifact(self._run_id, str(path))

    def close(self, state: RunState = "FINISHED") -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run_id, state)


class WandbTracker(Tracker):
    """Logs to Weights & Biases; continues the run of an earlier attempt.

    Args:
        project: Name of the project.
        run: What to show of the run.
        history: What an interrupted attempt has logged before the state from which it resumes, or
            None of a run that is not resumed. Offline it is logged again, because a process that
            is killed leaves a part of it, and the files of earlier attempts are removed.
    """

    def __init__(
        self, project: str, run: RunDescription, history: Sequence[Metrics] | None = None
    ) -> None:
        import wandb

        folder = Path(run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        if history is not None:
            for path in folder.glob(f"wandb/offline-run-*-{run.id}"):
                shutil.rmtree(path)
        self._run = wandb.init(
            project=project,
            name=run.name,
            id=run.id,
            resume="allow",
            group=run.experiment,
            job_type="trial" if run.parent else "run",
            config={**run.params, **run.hyperparameters, **run.tags},
            dir=run.folder,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        # A resumed run logs steps again, which W&B's own step does not allow.
        self._run.define_metric("*", step_metric="step")
        for line in (history or ()) if self._run.offline else ():
            self._run.log(dict(line))

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **metrics})

    def log_file(self, path: Path) -> None:
        """See `Tracker`."""
        import wandb

        is_folder = path.is_dir()
        artifact = wandb.Artifact(f"{self._run.id}-{path.name}", "model" if is_folder else "file")
        (artifact.add_dir if is_folder else artifact.add_file)(str(path))
        self._run.log_artifact(artifact)

    def close(self, state: RunState = "FINISHED") -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=int(state != "FINISHED"))


class _TolerantTracker(Tracker):
    """Goes on without a server that no longer answers: training must not wait for it."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.is_lost = False

    def log(self, step: int, metrics: Metrics) -> None:
        self._send(partial(self.tracker.log, step, metrics))

    def log_file(self, path: Path) -> None:
        self._send(partial(self.tracker.log_file, path))

    def close(self, state: RunState = "FINISHED") -> None:
        self._send(partial(self.tracker.close, state))

    def _send(self, function: Callable[[], None]) -> None:
        if not self.is_lost:
            with _tolerate_outage() as failures:
                function()
            self.is_lost = bool(failures)


@contextmanager
def _tolerate_outage() -> Iterator[list[Exception]]:
    """Logs an error of a server in the block; yields a list that then holds it."""
    failures: list[Exception] = []
    try:
        yield failures
    except Exception as error:  # What a client raises is not documented.
        failures.append(error)
        logger.warning("the run goes on, and is not tracked any more: %s", error)


def create_trackers(
    config: TrackingConfig,
    folder: Path,
    resumed_step: int,
    num_steps: int,
    run: RunDescription | None = None,
) -> list[Tracker]:
    """Creates the trackers of a run; only rank 0 needs them.

    Args:
        config: Which trackers to use.
        folder: Folder of the run, with its `metrics.jsonl`.
        resumed_step: Number of steps of the checkpoint from which the run resumes, or 0.
        num_steps: Number of steps of the run, if it does not stop early.
        run: What to show of the run.
    """
    run = (run or RunDescription()).with_defaults(folder)
    trackers: list[Tracker] = [
        ConsoleTracker(run.name, num_steps, resumed_step),
        JsonLinesTracker(folder / METRICS, resumed_step),
    ]
    if config.tensorboard:
        events = Path(run.folder) / "tensorboard"
        trackers.append(TensorBoardTracker(events, resumed_step, run.hyperparameters))
    return trackers + create_servers(config, run, read_metrics(folder / METRICS))


def create_servers(
    config: TrackingConfig, run: RunDescription, history: Sequence[Metrics] | None = None
) -> list[Tracker]:
    """Creates the trackers that send a run to a server.

    Args:
        config: Which trackers to use.
        run: What to show of the run.
        history: What earlier attempts of the run have logged; None if it is not resumed.
    """
    trackers: list[Tracker] = []
    if config.mlflow_uri:
        trackers.append(MLflowTracker(config.mlflow_uri, run))
    if config.wandb_project:
        trackers.append(WandbTracker(config.wandb_project, run, history))
    return [_TolerantTracker(tracker) for tracker in trackers]


@contextmanager
def calling_at_end(function: Callable[[RunState], object]) -> Iterator[None]:
    """Calls a function at the end of the block, with how it ended."""
    state: RunState = "KILLED"
    try:
        yield
        state = "FINISHED"
    except Exception:
        state = "FAILED"
        raise
    finally:
        function(state)


@contextmanager
def closing(trackers: Sequence[Tracker]) -> Iterator[None]:
    """Closes trackers at the end of the block, with the state of the run."""
    with ExitStack() as stack:
        for tracker in trackers:
            stack.enter_context(calling_at_end(tracker.close))
        yield


def end_run(config: TrackingConfig, run: RunDescription, state: RunState) -> None:
    """Sets the state of a run whose workers were lost, which MLflow does not see."""
    if config.mlflow_uri:
        with _tolerate_outage():
            client, experiment_id = _open_mlflow(config.mlflow_uri, run.experiment)
            if run_id := _find_mlflow_run(client, experiment_id, run):
                client.set_terminated(run_id, state)


def _open_mlflow(uri: str, experiment: str) -> tuple[Any, str]:
    """Returns a client and the id of an experiment, which is created if it does not exist."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client, location = MlflowClient(uri), None
    if uri.startswith("sqlite:///"):
        # By default the files of a database's runs go into the working directory.
        database = Path(uri.removeprefix("sqlite:///"))
        database.parent.mkdir(parents=True, exist_ok=True)
        location = (database.parent / "mlartifacts").as_uri()
    if (found := client.get_experiment_by_name(experiment)) is None:
        try:
            return client, client.create_experiment(experiment, location)
        except MlflowException:  # Another run of the experiment was faster.
            found = client.get_experiment_by_name(experiment)
            if found is None:
                raise
    return client, found.experiment_id


def _find_mlflow_run(client: Any, experiment_id: str, run: RunDescription) -> str | None:
    """Returns the id of an earlier attempt of a run, which has not finished; None without one."""
    condition = f"tags.`as2ray.key` = '{run.id}'"
    if not run.is_reopened:
        condition += " and attributes.status != 'FINISHED'"
    found = client.search_runs([experiment_id], condition, max_results=1)
    return found[0].info.run_id if found else None


def stage_name(folder: Path) -> str:
    """Returns what tells runs apart; in an experiment the stage, whose folder has `scratch/run`."""
    return folder.parents[1].name if folder.parts[-2:] == ("scratch", "run") else folder.name


def log_metrics(trackers: Sequence[Tracker], step: int, metrics: Metrics) -> None:
    """Logs metrics to every tracker."""
    for tracker in trackers:
        tracker.log(step, metrics)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads a `metrics.jsonl`; ignores a last line that a crash cut off."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
