"""Where a run of the loop reports to and resumes from.

Knows files. Must not know Ray: `distributed/train.py` has a `Run` that reports to Ray Train.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from as2ray.errors import RecipeError

Metrics = Mapping[str, float]


class Run(Protocol):
    """What the loop needs of the place in which it runs."""

    def resume(self) -> Path | None:
        """The last checkpoint of an earlier, interrupted try; None to begin."""

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """Takes the metrics of a validation, and takes the checkpoint folder over.

        Every worker calls it equally often; only rank 0 brings a checkpoint.
        """


class LocalRun:
    """A run in this process: keeps `best` and `last` in a folder.

    Args:
        folder: Where to; checkpoints of an earlier try are resumed from.
        selection: Metric whose highest value is best.
    """

    def __init__(self, folder: str | Path, selection: str) -> None:
        self.folder = Path(folder)
        self.selection = selection
        self.folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> Path | None:
        """See `Run`."""
        return self._held("last")

    def best(self) -> Path | None:
        """The checkpoint with the highest `selection` so far."""
        return self._held("best")

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """See `Run`."""
        if checkpoint is None:
            return
        if self.selection not in metrics:
            raise RecipeError(
                f"no metric {self.selection!r} among {sorted(metrics)}",
                expected="the metric that selects the best checkpoint",
                mend="name a validation set and measure that the run computes",
            )
        value, mark = float(metrics[self.selection]), self.folder / "best" / "selection"
        if not mark.is_file() or value > float(mark.read_text()):
            copy = Path(shutil.copytree(checkpoint, self.folder / ".best-new"))
            (copy / "selection").write_text(repr(value))
            self._replace("best", copy)
        self._replace("last", checkpoint)

    def _held(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.is_dir() else None

    def _replace(self, name: str, new: Path) -> None:
        target, old = self.folder / name, self.folder / f".{name}-old"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.rename(target, old)
        shutil.move(str(new), target)
        shutil.rmtree(old, ignore_errors=True)
