"""Trackers, which log the metrics of a run to the console, JSON lines, TensorBoard and MLflow."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.tables.atomic import atomic_file
from as2ray.training.checkpoint_store import Metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrackingConfig:
    """How a run is tracked. Changes nothing of its result."""

    log_every_steps: PositiveInt = 10
    """Steps between two reports of loss, learning rate and speed."""
    tensorboard: bool = True
    """Write TensorBoard files into the run's folder."""
    mlflow_uri: str | None = None
    """Tracking URI of an MLflow server or folder."""


class Tracker(Protocol):
    """Logs the metrics of a run."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Logs the metrics after `step` steps."""

    def close(self) -> None:
        """Writes what is buffered and ends the log."""


class ConsoleTracker:
    """Writes one line per report to Python's logging."""

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        logger.info("step %d  %s", step, "  ".join(f"{k} {v:.4g}" for k, v in metrics.items()))

    def close(self) -> None:
        """Does nothing."""


class JsonLinesTracker:
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

    def close(self) -> None:
        """See `Tracker`."""
        self._file.close()


class TensorBoardTracker:
    """Writes scalars for TensorBoard.

    Args:
        folder: Folder of the event files.
        resumed_step: Number of steps of the checkpoint from which the run resumes, or 0. Later
            points of the interrupted run are hidden.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from tensorboardX import SummaryWriter

        purge_step = resumed_step + 1 if resumed_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            # TensorBoard does not allow blanks in names.
            self._writer.add_scalar(name.replace(" ", "_"), value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class MLflowTracker:
    """Logs metrics to MLflow.

    Args:
        uri: Tracking URI.
        name: Name of the run.
    """

    def __init__(self, uri: str, name: str) -> None:
        import mlflow

        self._client: Any = mlflow
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment("as2ray")
        mlflow.start_run(run_name=name)

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        # MLflow does not allow `@` in names.
        self._client.log_metrics({k.replace("@", "_at_"): v for k, v in metrics.items()}, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._client.end_run()


def create_trackers(config: TrackingConfig, folder: Path, resumed_step: int) -> list[Tracker]:
    """Creates the trackers of a run; only rank 0 needs them.

    Args:
        config: Which trackers to use.
        folder: Folder of `metrics.jsonl` and of TensorBoard's files.
        resumed_step: Number of steps of the checkpoint from which the run resumes, or 0.
    """
    trackers: list[Tracker] = [
        ConsoleTracker(),
        JsonLinesTracker(folder / "metrics.jsonl", resumed_step),
    ]
    if config.tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard", resumed_step))
    if config.mlflow_uri:
        trackers.append(MLflowTracker(config.mlflow_uri, stage_name(folder)))
    return trackers


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
