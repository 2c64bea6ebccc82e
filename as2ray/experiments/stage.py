"""Stages: folders that are whole or absent, each with a manifest of what it was made from.

Knows files and plain values. Must not know what a stage does, nor Ray.

A stage is made in `FOLDER.part` and renamed when it is whole. A whole stage of the same identity
is not made again; a half-made one is gone on with; another identity under the same name is an
error that names what differs.
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
IDENTITY = "identity.json"
PACKAGES = ("as2ray", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy")


def stage(
    folder: str | Path,
    inputs: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any] | None],
) -> Path:
    """Makes a stage unless it is there.

    Args:
        folder: Where it will stand; its name is the stage's.
        identity: Everything that changes its result, as plain values or dataclasses.
        make: Fills the folder it is given (and finds there what an interrupted try left); what
            it returns goes into the manifest under `found`.

    Returns:
        `folder`.

    Raises:
        StageMismatchError: The folder, or its half-made `.part`, was made from something else.
    """
    folder = Path(folder).resolve()
    wanted = plain(inputs)
    if (folder / MANIFEST).is_file():
        _compare(folder, json.loads((folder / MANIFEST).read_text())["identity"], wanted)
        log.info("%s/%s: there already", folder.parent.name, folder.name)
        return folder
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    if (part / IDENTITY).is_file():
        _compare(part, json.loads((part / IDENTITY).read_text()), wanted)
    (part / IDENTITY).write_text(json.dumps(wanted, indent=2))
    log.info("%s/%s: making it", folder.parent.name, folder.name)
    began = time.perf_counter()
    try:
        found = make(part)
    except As2rayError:
        if [path.name for path in part.iterdir()] == [IDENTITY]:
            shutil.rmtree(part)  # nothing is lost, and what was corrected may take its place
        raise
    manifest = {
        "identity": wanted,
        "found": plain(found or {}),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - began, 2),
        "packages": _packages(),
        "commit": _commit(),
    }
    (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    (part / IDENTITY).unlink()
    os.rename(part, folder)
    return folder


def manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a whole stage."""
    read: dict[str, Any] = json.loads((Path(folder) / MANIFEST).read_text())
    return read


def digest(folder: str | Path) -> str:
    """Sixteen digits that stand for a stage in the identity of those built on it."""
    identity = json.dumps(manifest(folder)["identity"], sort_keys=True)
    return sha256(identity.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Dataclasses, tuples, paths as what JSON gives back, so that identities compare."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _compare(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    here, asked = _leaves(there), _leaves(wanted)
    differ = sorted(k for k in here.keys() | asked.keys() if here.get(k) != asked.get(k))
    if differ:
        told = "; ".join(f"{k}: {here.get(k)!r} there, {asked.get(k)!r} asked" for k in differ[:8])
        raise StaleStageError(
            f"{folder} was made from something else ({len(differ)} keys differ): {told}"
            "; expected the same identity under the same name",
            fix="choose another --output, or remove this stage and those built on it",
        )


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key in value for k, v in _leaves(value[key], f"{path}.{key}").items()}
    return {path.removeprefix("."): value}


@cache
def _packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def _commit() -> str | None:
    """The commit of the code, with `+` where files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
