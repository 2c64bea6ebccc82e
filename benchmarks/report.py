"""What all benchmarks share: flags, the limit on cores, the printed table and the JSON report."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from as2ray.corpora.verification import data_root

DEFAULT_NUM_CORES = 2
"""The claims are about two cores; on a larger machine the other cores stay idle. If other programs
use the cores, threads that wait for each other slow both sides unevenly; use `--cores 1` then."""

PACKAGES = ("as2ray", "ray", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


@dataclass(frozen=True)
class Claim:
    """A statement that the benchmark confirms or refutes, or a measurement."""

    claim: str
    measured: str
    """The measured value, with its range if it was repeated."""
    holds: bool | None
    """None if nothing is claimed."""


def parse_arguments(
    description: str | None,
    argv: Sequence[str] | None = None,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Parses the flags of every benchmark: `data`, `output`, `cores`, `small`, and its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=data_root(), help="folder of raw releases")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--cores", type=int, default=DEFAULT_NUM_CORES, help="cores to use")
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes")
    if add_flags:
        add_flags(parser)
    return parser.parse_args(argv)


def select_cores(num_cores: int) -> list[int]:
    """Returns the first cores that this process may use, which need not be the machine's first."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:num_cores]
    return list(range(min(num_cores, os.cpu_count() or 1)))


def limit_cores(num_cores: int) -> int:
    """Restricts this process and its children to some cores; returns their number."""
    cores = len(select_cores(num_cores))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, select_cores(num_cores))
    if torch := sys.modules.get("torch"):  # a benchmark without torch needs no threads
        torch.set_num_threads(cores)
    return cores


def write_report(
    name: str, args: argparse.Namespace, claims: Sequence[Claim], results: dict[str, Any]
) -> None:
    """Prints the claims as a table; writes claims and results to the file of `--output`."""
    table = Table(title=f"benchmarks.{name}" + (" --small" if args.small else ""))
    for column in ("claim", "measured", "holds"):
        table.add_column(column)
    for claim in claims:
        table.add_row(
            claim.claim, claim.measured, {True: "yes", False: "NO", None: ""}[claim.holds]
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if args.output:
        report = {
            "benchmark": name,
            "small": args.small,
            "cores": args.cores,
            # Seeds and whatever else is a number, and families; paths are of one machine.
            "arguments": {
                name: value
                for name, value in vars(args).items()
                if isinstance(value, int | float) or (name == "family" and value)
            },
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _read_commit(),
            "machine": _describe_machine(),
            "claims": [asdict(claim) for claim in claims],
            "results": results,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _read_commit() -> str | None:
    """Returns the commit of the checkout, with a `+` where files differ; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _describe_machine() -> dict[str, Any]:
    import torch  # takes seconds, and not every benchmark needs it

    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "bf16": torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        # A load above the number of used cores means that other programs disturbed the run.
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {package: _get_package_version(package) for package in PACKAGES},
    }


def _get_package_version(package: str) -> str | None:
    """Returns None for a package that is not installed, such as Ray on a GPU machine."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
