"""What every benchmark shares: its flags, the cores it holds to, its table and its JSON.

Knows the machine and files. Must not know what is measured.
"""

import argparse
import json
import os
import platform
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
"""The claims are about two cores; on a larger machine the others stay idle. Where others keep them
busy, threads that wait for each other slow both sides by much and unevenly: take `--cores 1`."""

PACKAGES = ("as2ray", "ray", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


@dataclass(frozen=True)
class Claim:
    """One sentence that the benchmark holds or refutes."""

    claim: str
    measured: str
    """The value, with its spread where it was repeated."""
    holds: bool | None
    """None where nothing is claimed."""


def parse_arguments(
    description: str | None,
    argv: Sequence[str] | None = None,
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """The flags of every benchmark: `data` (Path), `output` (Path or None), `cores`, `small`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=data_root(), help="folder of raw releases")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--cores", type=int, default=DEFAULT_NUM_CORES, help="cores to hold to")
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes")
    if add_flags:
        add_flags(parser)
    return parser.parse_args(argv)


def select_cores(num_cores: int) -> list[int]:
    """The first `count` cores that this process may use: not all machines give it their first."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:num_cores]
    return list(range(min(num_cores, os.cpu_count() or 1)))


def limit_cores(num_cores: int) -> int:
    """Keeps this process and its children to its first `count` cores; how many it has then."""
    cores = len(select_cores(num_cores))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, select_cores(num_cores))
    if torch := sys.modules.get("torch"):  # where it is not, nothing computes
        torch.set_num_threads(cores)
    return cores


def write_report(
    name: str, args: argparse.Namespace, claims: Sequence[Claim], results: dict[str, Any]
) -> None:
    """Prints the claims as a table; writes them and all results where `--output` says."""
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
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _describe_machine(),
            "claims": [asdict(claim) for claim in claims],
            "results": results,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _describe_machine() -> dict[str, Any]:
    import torch  # takes seconds, and streams need none

    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "bf16": torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        # A load above the cores used says that others disturbed the run.
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {package: _get_package_version(package) for package in PACKAGES},
    }


def _get_package_version(package: str) -> str | None:
    """None where it is not installed, as Ray need not be on a GPU machine."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
