"""Stages: folders that are complete or do not exist, each with a manifest of its inputs.

A stage is made in `FOLDER.part`, which is renamed when it is complete. A complete stage with the
same inputs is used again, an interrupted one is continued, and other inputs under the same name
are an error that names the difference.
"""

import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from as2ray.errors import As2rayError, StaleStageError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
INPUTS = "inputs.json"
FORMAT_VERSION = 2
PACKAGES = ("as2ray", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy")


def stage(
    folder: str | Path,
    inputs: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any] | None],
) -> Path:
    """Makes a stage unless it exists.

    Args:
        folder: Folder of the stage; its name is the stage's.
        inputs: Everything that changes the result, as plain values or dataclasses.
        make: Fills the folder that it is given, which still contains what an interrupted call
            left. The manifest stores the returned values under `outputs`.

    Returns:
        `folder`, as an absolute path.

    Raises:
        StaleStageError: The folder, or its incomplete `.part`, was made from other inputs or by an
            older version of as2ray.
    """
    folder = Path(folder).resolve()
    plain_inputs = plain(inputs)
    if (folder / MANIFEST).is_file():
        _compare(folder, manifest(folder)["inputs"], plain_inputs)
        log.info("%s/%s: exists", folder.parent.name, folder.name)
        return folder
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    if (part / INPUTS).is_file():
        _compare(part, json.loads((part / INPUTS).read_text()), plain_inputs)
    elif any(part.iterdir()) and not (part / MANIFEST).is_file():
        raise StaleStageError(
            f"{part} has no {INPUTS}: it was not made by this version of as2ray",
            fix="choose another --output, or remove this folder",
        )
    (part / INPUTS).write_text(json.dumps(plain_inputs, indent=2))
    log.info("%s/%s: started", folder.parent.name, folder.name)
    started_at = time.perf_counter()
    try:
        outputs = make(part)
    except As2rayError:
        if [path.name for path in part.iterdir()] == [INPUTS]:
            shutil.rmtree(part)  # Nothing is lost, and corrected inputs can use the name.
        raise
    entries = {
        "format_version": FORMAT_VERSION,
        "inputs": plain_inputs,
        "outputs": plain(outputs or {}),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration_s": round(time.perf_counter() - started_at, 2),
        "packages": _packages(),
        "git_commit": _git_commit(),
    }
    (part / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n")
    (part / INPUTS).unlink()
    os.rename(part, folder)
    return folder


def manifest(folder: str | Path) -> dict[str, Any]:
    """Reads the manifest of a complete stage.

    Raises:
        StaleStageError: The stage was made by an older version of as2ray.
    """
    entries: dict[str, Any] = json.loads((Path(folder) / MANIFEST).read_text())
    if entries.get("format_version") != FORMAT_VERSION:
        raise StaleStageError(
            f"{folder} has format_version {entries.get('format_version')}, and this version of "
            f"as2ray reads {FORMAT_VERSION}",
            fix="choose another --output",
        )
    return entries


def digest(folder: str | Path) -> str:
    """Returns 16 hexadecimal digits that represent a stage in the inputs of later stages."""
    inputs = json.dumps(manifest(folder)["inputs"], sort_keys=True)
    return sha256(inputs.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Converts dataclasses, tuples and paths to what JSON returns, so that inputs compare."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _compare(folder: Path, stored: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    old, new = _leaves(stored), _leaves(inputs)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if changed:
        changes = "; ".join(f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed[:8])
        raise StaleStageError(
            f"{folder} was made from other inputs; {len(changed)} keys differ (stage -> now): "
            f"{changes}",
            fix="choose another --output, or remove this stage and those built on it",
        )


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key in value for k, v in _leaves(value[key], f"{path}.{key}").items()}
    return {path.removeprefix("."): value}


@cache
def _packages() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@cache
def _git_commit() -> str | None:
    """Returns the commit of the code, with `+` if files differ from it; None without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    describe = [*git, "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
