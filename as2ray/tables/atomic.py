"""Files and folders that appear complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the file written there replaces `path` at the end.

    If the body raises, `path` stays as it was and the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}-{uuid4().hex[:8]}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a new folder beside `path`, which becomes `path` at the end.

    If the body raises, `path` stays as it was and the new folder is removed.

    Args:
        path: The folder to make; its parents are made if they are missing.
        overwrite: Replace a folder of that name; without it, one that exists is an error.

    Raises:
        FileExistsError: Something lies at `path`, and it may not be replaced.
    """
    path, suffix = Path(path), uuid4().hex[:8]
    new, old = (path.with_name(f".{path.name}-{state}-{suffix}") for state in ("new", "old"))
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(f"{path} exists")
    new.mkdir(parents=True)
    try:
        yield new
        if os.path.lexists(path):
            if not overwrite:
                raise FileExistsError(f"{path} exists")
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        shutil.rmtree(new, ignore_errors=True)
        raise
    with suppress(OSError):
        shutil.rmtree(old)


def is_writable(folder: str | Path) -> bool:
    """Whether this process may make files in a folder."""
    effective_ids = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective_ids)


def replace_folder(new: Path, path: Path) -> None:
    """Moves a complete folder to a path, in place of what an interrupted attempt has left there."""
    shutil.rmtree(path, ignore_errors=True)
    new.rename(path)
