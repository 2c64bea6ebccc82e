"""Checkpoints of a run: reported during training, and read again to resume or to select one."""

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from as2ray.errors import ConfigError
from as2ray.tables.atomic import atomic_folder

Metrics = Mapping[str, float]


class CheckpointStore(Protocol):
    """Keeps the checkpoints of a run. `distributed/train.py` has one that reports to Ray Train."""

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """Yields the last checkpoint of an interrupted run, or None if there is none."""

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """Reports the metrics of an evaluation and moves the checkpoint folder into the store.

        Every worker calls it equally often; only rank 0 passes a checkpoint.
        """


class LocalCheckpointStore:
    """Keeps the checkpoints `best` and `last` in a folder of this machine.

    Args:
        folder: Folder of the checkpoints; a run resumes from those of an interrupted one.
        select_by: Metric whose highest value is the best.
    """

    def __init__(self, folder: str | Path, select_by: str) -> None:
        self.folder = Path(folder)
        self.select_by = select_by
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("best", "last"):
            self._recover(name)

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """See `CheckpointStore`."""
        return nullcontext(self._find_checkpoint("last"))

    def best_checkpoint(self) -> Path | None:
        """Returns the checkpoint with the highest `select_by`; of equal ones the latest, as Ray."""
        return self._find_checkpoint("best")

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """See `CheckpointStore`."""
        if checkpoint is None:
            return
        if self.select_by not in metrics:
            raise ConfigError(
                f"the metric {self.select_by!r}, which selects the best checkpoint, is not among "
                f"{sorted(metrics)}",
                fix="select by a metric of an evaluation table of the run",
            )
        value, best = float(metrics[self.select_by]), self.best_checkpoint()
        with atomic_folder(self.folder / "last", overwrite=True) as new_last:
            for path in checkpoint.iterdir():
                shutil.move(path, new_last)
            checkpoint.rmdir()
            if best is None or value >= float((best / "selection").read_text()):
                with atomic_folder(self.folder / "best", overwrite=True) as new_best:
                    shutil.copytree(
                        new_last, new_best, copy_function=hardlink_or_copy, dirs_exist_ok=True
                    )
                    (new_best / "selection").write_text(repr(value))

    def _find_checkpoint(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.is_dir() else None

    def _recover(self, name: str) -> None:
        """Completes what a process that was killed inside `atomic_folder` left behind."""
        for path in self.folder.glob(f".{name}-old-*"):
            if self._find_checkpoint(name) is None:
                os.rename(path, self.folder / name)
        for path in self.folder.glob(f".{name}-*"):
            shutil.rmtree(path)


def hardlink_or_copy(source: str, target: str) -> None:
    """Links a file under a second name, or copies it where the file system has no hard links.

    A file that exists at `target` is replaced.
    """
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
