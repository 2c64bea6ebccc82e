"""Resume states of a run: where they are kept, and when they are due."""

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from as2ray.tables.atomic import atomic_folder

Metrics = Mapping[str, float]

BEST = "best"
"""Folder in a run's folder, with the selected checkpoint. A run that has it is complete."""

STATE_FILE = "progress.json"
"""File of a checkpoint with the progress of its run."""


class CheckpointStore(Protocol):
    """Keeps the resume states of a run. `distributed/train.py` has one for Ray Train.

    A resume state is a folder with the weights, the optimizer's state and the progress of a run.
    """

    folder: Path
    """Folder of the run, which all workers see; the best weights are written there."""
    resume_interval_s: float
    """Seconds between two resume states."""
    check_every_steps: int
    """Steps between two checks whether a resume state is due."""

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """Yields the last resume state of an interrupted run, or None if there is none."""

    def save(self, checkpoint: Path | None) -> None:
        """Moves a resume state into the store, possibly in the background.

        Every worker calls it. Rank 0 passes a folder, and of a sharded model the other ranks pass
        theirs, with other files in the same subfolders. When it returns, the resume state of
        the call before is complete, whatever happens.
        """

    def report(self, metrics: Metrics) -> None:
        """Reports the metrics of an evaluation to a search; every worker calls it."""

    def is_node_leaving(self) -> bool:
        """Returns whether the run is about to lose a node; every worker calls it equally often."""


class LocalCheckpointStore:
    """Keeps the last resume state in the run's folder.

    Args:
        folder: Folder of the run; a run resumes from the state of an interrupted one.
        resume_interval_s: Seconds between two resume states.
        check_every_steps: Steps between two checks whether a resume state is due.
    """

    def __init__(
        self, folder: str | Path, resume_interval_s: float = 600.0, check_every_steps: int = 1
    ) -> None:
        self.folder = Path(folder)
        self.resume_interval_s, self.check_every_steps = resume_interval_s, check_every_steps
        self._last = self.folder / "last"
        self.folder.mkdir(parents=True, exist_ok=True)
        # A process that was killed inside `atomic_folder` leaves folders behind.
        for path in self.folder.glob(".last-old-*"):
            if not self._last.exists():
                os.rename(path, self._last)
        for path in self.folder.glob(".last-*"):
            shutil.rmtree(path)

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """See `CheckpointStore`."""
        return nullcontext(self._last if self._last.exists() else None)

    def save(self, checkpoint: Path | None) -> None:
        """See `CheckpointStore`; all ranks must see the run's folder."""
        from as2ray.training import parallel

        parts = self.folder / ".last-parts"
        if checkpoint is not None and parallel.get_rank() > 0:
            _move_files(checkpoint, parts)
        parallel.barrier()
        if checkpoint is None or parallel.get_rank() > 0:
            return
        with atomic_folder(self._last, overwrite=True) as new_last:
            for folder in filter(Path.exists, (checkpoint, parts)):
                _move_files(folder, new_last)

    def report(self, metrics: Metrics) -> None:
        """Does nothing: no search listens."""

    def is_node_leaving(self) -> bool:
        """Returns False: this machine stays."""
        return False


def _move_files(source: Path, target: Path) -> None:
    """Moves the files of a folder into another one, which may have files of the same folders."""
    shutil.copytree(source, target, copy_function=shutil.move, dirs_exist_ok=True)
    shutil.rmtree(source)


def hardlink_or_copy(source: str, target: str) -> None:
    """Links a file under a second name, or copies it where the file system has no hard links.

    A file that exists at `target` is replaced.
    """
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
