"""Drivers in work, and the training workers of this process' cluster."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from as2ray.training.tracking import read


def maps(folder: Path) -> dict[float, float]:
    """Dev MAP by step that a run has told of."""
    return {x["step"]: x["dev/AP"] for x in read(folder / "metrics.jsonl") if "dev/AP" in x}


class Run:
    """A driver in work.

    Args:
        process: The driver.
        folder: Of its run.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder

    def maps(self) -> dict[float, float]:
        """Dev MAP by step."""
        return maps(self.folder)

    def until(self, reached: Callable[[], bool], seconds: float = 150.0) -> None:
        """Waits for something while the driver works."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, f"ended early:\n{self.output()}"
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.2)

    def output(self) -> str:
        """What the driver said, once it has ended."""
        return self.process.communicate(timeout=200)[0]


def workers() -> list[psutil.Process]:
    """The training workers of this process' cluster."""
    found = []
    for process in psutil.Process().children(True):
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # gone between the listing and the look
            continue
    return found
