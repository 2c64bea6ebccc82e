"""Files outside the store that results are made of: what they were, and whether they changed."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from as2ray.errors import StaleStageError


def hash_table(path: str) -> str:
    """Returns a hash of the content of a file or folder; the name of what is none."""
    folder = Path(path)
    if not folder.exists():
        return path
    return hash_files([folder] if folder.is_file() else folder.rglob("*"))


def hash_files(paths: Iterable[Path]) -> str:
    """Returns a hash of the contents of files, in the order of their paths; skips folders."""
    digest = sha256()
    for path in sorted(path for path in paths if path.is_file()):
        digest.update(hash_file(path))
    return digest.hexdigest()[:16]


def hash_file(path: Path) -> bytes:
    """Returns the SHA-256 of a file; reads it again only if its size or time has changed."""
    status = path.stat()
    return _hash_file(path, status.st_size, status.st_mtime_ns)


@lru_cache(1024)
def _hash_file(path: Path, size: int, modified_ns: int) -> bytes:
    with path.open("rb") as file:
        return file_digest(file, "sha256").digest()


def model_files(path: str) -> dict[str, Path]:
    """Returns the files of a local model folder by name, and the settings of its modules.

    Empty for the name of a model. Hidden files and checkpoints in subfolders are no part of it.
    """
    folder = Path(path)
    paths = [*folder.glob("*"), *folder.glob("*/config.json")] if folder.is_dir() else []
    names = {path.relative_to(folder).as_posix(): path for path in sorted(paths) if path.is_file()}
    return {name: path for name, path in names.items() if not name.startswith(".")}


def describe_files(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Returns the size in bytes, the time of change and the hash of each file, by its name."""
    return {
        name: {
            "size": path.stat().st_size,
            "modified_ns": path.stat().st_mtime_ns,
            "sha256": hash_file(path).hex(),
        }
        for name, path in files.items()
    }


def check_files(
    stored: Mapping[str, Any] | None, files: Mapping[str, Path], source: str, fix: str
) -> None:
    """Checks that files are those that were described; only one whose time differs is read.

    Nothing is compared without `files`: they are gone, or were never there.

    Args:
        stored: What `describe_files` returned; or sizes in bytes by name, of older versions.
        files: The files now, by name.
        source: What they are, for the error.
        fix: What to do about it.

    Raises:
        StaleStageError: Files differ; names them.
    """
    if not stored or not files:
        return
    is_older = any(isinstance(state, int) for state in stored.values())
    names = sorted({*stored} if is_older else {*stored, *files})
    changed = [
        n for n in names if n not in stored or n not in files or _differs(stored[n], files[n])
    ]
    if changed:
        problem = f"{source} has changed since a result was made of it: {', '.join(changed)}"
        raise StaleStageError(problem, fix)


def _differs(state: Any, path: Path) -> bool:
    status = path.stat()
    if not isinstance(state, dict):
        return bool(state != status.st_size)
    is_touched = state["modified_ns"] != status.st_mtime_ns
    return bool(
        state["size"] != status.st_size or (is_touched and state["sha256"] != hash_file(path).hex())
    )
