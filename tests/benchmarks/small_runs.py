"""Small runs of benchmarks, and what they write."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A process of this Python, where no raw release is to be found."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "AS2RAY_DATA": str(folder / "nowhere")},
        capture_output=True,
        text=True,
        timeout=1500,  # less than the test has: what is killed leaves its services running
    )


def report(path: Path, name: str) -> dict:
    """What a small run wrote."""
    found = json.loads(path.read_text())
    assert {
        "benchmark",
        "small",
        "cores",
        "arguments",
        "created_at",
        "commit",
        "machine",
        "claims",
        "results",
    } == set(found)
    assert (found["benchmark"], found["small"]) == (name, True)
    assert all({"claim", "measured", "holds"} == set(claim) for claim in found["claims"])
    return found


def alone(folder: Path, name: str, *flags: str) -> dict:
    """What a benchmark writes that the command line starts."""
    output = folder / f"{name}.json"
    done = started(folder, "-m", f"benchmarks.{name}", "--small", "--output", str(output), *flags)
    assert done.returncode == 0, done.stderr
    assert f"benchmarks.{name}" in done.stdout
    return report(output, name)


def here(folder: Path, name: str, *flags: str) -> dict:
    """What a benchmark writes that starts the processes it measures; its own is this one."""
    output = folder / f"{name}.json"
    common = ("--small", "--data", str(folder / "nowhere"), "--output", str(output))
    importlib.import_module(f"benchmarks.{name}").main([*common, *flags])
    return report(output, name)
