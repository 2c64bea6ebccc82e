"""Where a run of the loop reports to and resumes from.

Knows files. Must not know Ray: `distributed/train.py` has a `Run` that reports to Ray Train.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from as2ray.errors import ConfigError

Metrics = Mapping[str, float]


class CheckpointStore(Protocol):
    """What the loop needs of the place in which it runs."""

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """The last checkpoint of an earlier, interrupted try, while it is read; None to begin."""

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """Takes the metrics of a validation, and takes the checkpoint folder over.

        Every worker calls it equally often; only rank 0 brings a checkpoint.
        """


class LocalCheckpointStore:
    """A run in this process: keeps `best` and `last` in a folder.

    Args:
        folder: Where to; checkpoints of an earlier try are resumed from.
        selection: Metric whose highest value is best.
    """

    def __init__(self, folder: str | Path, select_by: str) -> None:
        self.folder = Path(folder)
        self.select_by = select_by
        self.folder.mkdir(parents=True, exist_ok=True)

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """See `Run`."""
        return nullcontext(self._find_checkpoint("last"))

    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the highest `selection` so far; of equals the later, as Ray's."""
        return self._find_checkpoint("best")

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """See `Run`."""
        if checkpoint is None:
            return
        if self.select_by not in metrics:
            raise ConfigError(
                f"no metric {self.select_by!r} among {sorted(metrics)}"
                "; expected the metric that selects the best checkpoint",
                fix="name a validation set and measure that the run computes",
            )
        value, best = float(metrics[self.select_by]), self.best_checkpoint()
        moved = Path(shutil.move(checkpoint, self._clear_staging_path("last")))
        if best is None or value >= float((best / "selection").read_text()):
            copy = shutil.copytree(
                moved, self._clear_staging_path("best"), copy_function=hardlink_or_copy
            )
            (copy / "selection").write_text(repr(value))
            self._replace("best")
        self._replace("last")

    def _find_checkpoint(self, name: str) -> Path | None:
        # A process killed between two renames leaves the older one aside.
        places = (self.folder / name, self.folder / f".{name}-old")
        return next((path for path in places if path.is_dir()), None)

    def _clear_staging_path(self, name: str) -> Path:
        """Where the next `name` is written; a half one of a killed process goes."""
        path = self.folder / f".{name}-new"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def _replace(self, name: str) -> None:
        """Puts a whole new checkpoint in the older one's place."""
        target, old = self.folder / name, self.folder / f".{name}-old"
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        os.rename(self.folder / f".{name}-new", target)
        shutil.rmtree(old, ignore_errors=True)


def hardlink_or_copy(source: str, target: str) -> None:
    """One file under two names, which takes no room; a copy where file systems have but one.

    What `target` was before, as a half copy, it is no more.
    """
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
