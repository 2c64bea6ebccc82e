"""Trackers: what a run tells the terminal, a JSON lines file, TensorBoard and MLflow.

Knows metrics by name and step. Must not know models, data or Ray.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from as2ray.training.checkpoint_store import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackingConfig:
    """What follows a run; changes nothing of its result."""

    log_every_steps: int = 10
    """Steps between two reports of loss, rate and speed."""
    tensorboard: bool = True
    """Write TensorBoard files into the run's folder."""
    mlflow_uri: str | None = None
    """Tracking URI of an MLflow server or folder."""


class Tracker(Protocol):
    """Takes metrics as they come."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics after `step` steps."""

    def close(self) -> None:
        """Writes out what is held back."""


class ConsoleTracker:
    """One plain line a report, through the standard logger."""

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        log.info("step %d  %s", step, "  ".join(f"{k} {v:.4g}" for k, v in metrics.items()))

    def close(self) -> None:
        """Nothing is held back."""


class JsonLinesTracker:
    """One JSON object a line; lines past the step resumed from are taken out.

    Args:
        path: The file.
        resumed: Steps that were done when this try began.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        part.replace(path)  # who reads, or is killed here, finds the old lines or these
        self._file = path.open("a")

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._file.close()


class TensorBoardTracker:
    """Scalars for TensorBoard.

    Args:
        folder: Where its event files go.
        resumed: Steps that were done when this try began; later points of an earlier try vanish.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            str(folder), purge_step=resumed_step + 1 if resumed_step else None
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            # TensorBoard's names know no spaces.
            self._writer.add_scalar(name.replace(" ", "_"), value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class MLflowTracker:
    """Metrics for MLflow.

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
        # MLflow's names know no `@`.
        self._client.log_metrics({k.replace("@", "_at_"): v for k, v in metrics.items()}, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._client.end_run()


def create_trackers(tracking: TrackingConfig, folder: Path, resumed_step: int) -> list[Tracker]:
    """The trackers of a run, for rank 0.

    Args:
        tracking: Which.
        folder: Where `metrics.jsonl` and TensorBoard's files go.
        resumed: Steps that were done when this try began.
    """
    found: list[Tracker] = [
        ConsoleTracker(),
        JsonLinesTracker(folder / "metrics.jsonl", resumed_step),
    ]
    if tracking.tensorboard:
        found.append(TensorBoardTracker(folder / "tensorboard", resumed_step))
    if tracking.mlflow_uri:
        # A pipeline's run lies in the stage that it makes.
        stage = folder.parent.name.removesuffix(".part")
        found.append(
            MLflowTracker(tracking.mlflow_uri, stage if folder.name == "run" else folder.name)
        )
    return found


def log_metrics(trackers: Sequence[Tracker], step: int, metrics: Metrics) -> None:
    """Gives metrics to every tracker."""
    for tracker in trackers:
        tracker.log(step, metrics)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole lines of a `metrics.jsonl`; a last line that a crash cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
