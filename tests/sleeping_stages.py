"""Stages that sleep, count their runs and fail, for tests of executors."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from as2ray.errors import TrainingError
from as2ray.experiments.stage import NOT_IDENTITY, Stage


@dataclass(frozen=True, eq=False)
class Cell(Stage):
    """Writes numbers that follow from its name, after some seconds of work."""

    name: str
    after: tuple[Stage, ...] = ()
    seconds: float = field(default=0.0, metadata=NOT_IDENTITY)
    log: str | None = field(default=None, metadata=NOT_IDENTITY)
    """A folder that gets a file for each run."""
    meet: int = field(default=0, metadata=NOT_IDENTITY)
    """Number of runs in the log that it waits for, itself among them."""
    expected_hours: float = field(default=0.01, metadata=NOT_IDENTITY)

    def run(self, context):
        """Leaves a trace of the attempt, works, and writes the result."""
        if self.log:
            (Path(self.log) / f"{self.name}-{time.time_ns()}-{os.getpid()}").touch()
            deadline = time.monotonic() + 900
            while len(runs(Path(self.log))) < self.meet:
                assert time.monotonic() < deadline, "the others do not run at the same time"
                time.sleep(0.1)
        time.sleep(self.seconds)
        seed = [*self.name.encode(), *(context.outputs(s)["first"] for s in self.after)]
        numbers = np.random.default_rng(seed).integers(1_000, size=4)
        np.save(context.output / "numbers.npy", numbers)
        return {"first": int(numbers[0])}

    def hours(self):
        """See `Stage`."""
        return self.expected_hours


@dataclass(frozen=True, eq=False)
class KilledOnce(Cell):
    """Ends its own process in the first attempt, after it has left some work."""

    def run(self, context):
        """Resumes from the work of the first attempt."""
        work = context.scratch / "half"
        if not work.exists():
            context.scratch.mkdir(parents=True)
            work.touch()
            os._exit(1)
        return super().run(context)


@dataclass(frozen=True, eq=False)
class Closing(Cell):
    """Leaves a file when it ends, however it ends."""

    def run(self, context):
        """Runs as a cell does."""
        try:
            return super().run(context)
        finally:
            (context.output / "closed").touch()


@dataclass(frozen=True, eq=False)
class Failing(Stage):
    """Fails: with an error of the user, or with a bug."""

    message: str
    is_bug: bool = False

    def run(self, context):
        """Raises."""
        raise ZeroDivisionError(self.message) if self.is_bug else TrainingError(self.message)


def runs(log: Path) -> list[str]:
    """Names of the cells that ran, in order."""
    files = sorted(log.iterdir(), key=_started_at)
    return [path.name.rsplit("-", 2)[0] for path in files]


def start_times(log: Path) -> list[float]:
    """When the cells started, in seconds, in order."""
    return [_started_at(path) / 1e9 for path in sorted(log.iterdir(), key=_started_at)]


def _started_at(path: Path) -> int:
    return int(path.name.split("-")[-2])


def skip_published_counts() -> None:
    """Lets made-up releases have sizes of their own, in a worker of Ray."""
    from as2ray.corpora.corpus import Corpus

    Corpus.check_counts = lambda *_: False
