"""The store: files of finished stages by digest, in a folder or on an object store."""

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.fs as pa_fs
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from as2ray.errors import ConfigError, StaleStageError
from as2ray.experiments.stage import Result, Stage

FORMAT_VERSION = 3
"""Version of the manifest; a manifest of another version is refused."""
MANIFEST = "manifest.json"
LEASE = "lease.json"
SCRATCH = "scratch"

DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}
"""Schemes of object stores, and the package that fsspec needs for each."""

RENEWAL_S = 10.0
"""Seconds between two renewals of a lease."""
LEASE_TIMEOUT_S = 60.0
"""Seconds after which a lease that was not renewed is taken over."""
SETTLE_S = 1.0
"""Seconds after which all processes that write a lease see which of them wrote last."""
NUM_LOOKUPS = 32
"""Manifests that are read at the same time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Store:
    """Finished stages in `URI/KIND/DIGEST`; a folder without a manifest is an interrupted attempt.

    Stages write local files. In a store on an object store, they write into a cache on the node,
    which is uploaded when they are finished. Endpoints and credentials are settings of fsspec's
    drivers, such as AWS_ENDPOINT_URL and FSSPEC_S3_ENDPOINT_URL.

    Raises:
        ConfigError: The scheme is unknown, or its driver is not installed.
    """

    uri: str
    """A folder, or a URI: `file://`, `s3://`, `gs://`, `abfs://`."""
    cache: str = "~/.cache/as2ray/store"
    """Folder on each node with the files of an object store."""

    def __post_init__(self) -> None:
        prefix = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/+", self.uri)
        scheme = prefix[1].lower() if prefix else "file"
        if scheme == "file":
            path = self.uri[prefix.end() - 1 :] if prefix else self.uri
            # Workers of Ray have another working directory.
            uri = str(Path(path).expanduser().absolute())
        elif scheme not in DRIVERS:
            raise ConfigError(
                f"store {self.uri}: unknown scheme {scheme!r}; accepted are a folder, "
                f"{', '.join(f'{name}://' for name in ('file', *DRIVERS))}"
            )
        elif find_spec(DRIVERS[scheme]) is None:
            raise ConfigError(
                f"store {self.uri}: {scheme}:// needs the package {DRIVERS[scheme]}",
                fix=f"pip install {DRIVERS[scheme]}",
            )
        else:
            uri = f"{scheme}://{self.uri[prefix.end() :].rstrip('/')}" if prefix else ""
        object.__setattr__(self, "uri", uri)

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder, which stages write into directly."""
        return "://" not in self.uri

    @cached_property
    def _location(self) -> tuple[AbstractFileSystem, str]:
        # Listings change: other processes write to the store.
        filesystem, root = url_to_fs(self.uri, use_listings_cache=False)
        return filesystem, str(root)

    def work_folder(self, kind: str, digest: str) -> Path:
        """Returns the local folder that a stage writes into."""
        root = self._location[1]
        folder = Path(root) if self.is_local else Path(self.cache).expanduser() / root
        return folder / kind / digest

    def manifest(self, kind: str, digest: str) -> dict[str, Any] | None:
        """Returns the manifest of a finished stage, or None.

        Raises:
            StaleStageError: The manifest is of another version.
        """
        content = self._read(f"{kind}/{digest}/{MANIFEST}")
        if content is None:
            return None
        manifest: dict[str, Any] = json.loads(content)
        if manifest.get("format_version") != FORMAT_VERSION:
            raise StaleStageError(
                f"{self.uri}/{kind}/{digest} has format_version {manifest.get('format_version')}; "
                f"this version of as2ray reads {FORMAT_VERSION}",
                fix="remove the folder, or give another --store",
            )
        return manifest

    def find(self, stage: Stage, fingerprints: Mapping[Stage, str]) -> Result | None:
        """Returns a stage's result, or None if it is not finished.

        Args:
            stage: The stage.
            fingerprints: Fingerprints of its inputs.

        Raises:
            StaleStageError: See `manifest`.
        """
        digest = stage.digest(fingerprints)
        manifest = self.manifest(stage.kind, digest)
        return None if manifest is None else Result(stage.kind, digest, manifest["outputs"])

    def find_all(self, stages: Iterable[Stage]) -> dict[Stage, Result]:
        """Returns the results of all stages that are finished, as are all that they build on.

        Args:
            stages: Stages with all their inputs.

        Raises:
            StaleStageError: See `manifest`.
        """
        results: dict[Stage, Result] = {}
        sorter = TopologicalSorter({stage: stage.inputs for stage in stages})
        sorter.prepare()
        with ThreadPoolExecutor(NUM_LOOKUPS) as pool:
            while sorter.is_active():
                ready = sorter.get_ready()
                known = [stage for stage in ready if results.keys() >= set(stage.inputs)]
                fingerprints = {stage: result.fingerprint for stage, result in results.items()}
                found = pool.map(lambda stage: self.find(stage, fingerprints), known)
                results |= {stage: result for stage, result in zip(known, found) if result}
                sorter.done(*ready)
        return results

    def fetch(self, result: Result) -> Path:
        """Returns a local folder with the files of a finished stage."""
        folder = self.work_folder(result.kind, result.digest)
        if self.is_local or (folder / MANIFEST).exists():
            return folder
        with _locked(folder):
            manifest = self.manifest(result.kind, result.digest)
            if manifest is None:
                raise StaleStageError(
                    f"{result.kind} {result.digest} is not in {self.uri} any more"
                )
            if not (folder / MANIFEST).exists():
                shutil.rmtree(folder, ignore_errors=True)
                filesystem, root = self._location
                remote = f"{root}/{result.kind}/{result.digest}"
                for name in manifest["files"]:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                filesystem.get(
                    [f"{remote}/{name}" for name in manifest["files"]],
                    [str(folder / name) for name in manifest["files"]],
                )
                (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        return folder

    def commit(self, kind: str, digest: str, manifest: Mapping[str, Any]) -> None:
        """Finishes a stage: uploads its files, writes the manifest, then removes `scratch/`.

        Args:
            kind: Kind of the stage.
            digest: Its digest.
            manifest: Entries of the manifest, of which `outputs` is required; `format_version` and
                `files` (bytes by name) are added.
        """
        folder, (filesystem, root) = self.work_folder(kind, digest), self._location
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
        sizes = {
            name: path.stat().st_size
            for name, path in paths.items()
            if path.is_file()
            and name not in (MANIFEST, LEASE)
            and not name.startswith(f"{SCRATCH}/")
        }
        entries = {"format_version": FORMAT_VERSION, **manifest, "files": sizes}
        content = (json.dumps(entries, indent=2) + "\n").encode()
        if not self.is_local:
            remote = f"{root}/{kind}/{digest}"
            filesystem.put([str(paths[n]) for n in sizes], [f"{remote}/{n}" for n in sizes])
            with _locked(folder):  # A process that fetches waits for the local manifest.
                self._write(f"{kind}/{digest}/{MANIFEST}", content)
                (folder / MANIFEST).write_bytes(content)
            with suppress(FileNotFoundError):
                filesystem.rm(f"{remote}/{SCRATCH}", recursive=True)
        else:
            self._write(f"{kind}/{digest}/{MANIFEST}", content)
        # After the manifest: a process that is killed here has lost nothing that is needed.
        shutil.rmtree(folder / SCRATCH, ignore_errors=True)

    def publish(self, path: Path) -> None:
        """Uploads a file below a work folder, so that an attempt on another node can resume."""
        if not self.is_local:
            filesystem, root = self._location
            filesystem.put_file(str(path), f"{root}/{self._name(path)}")

    def restore(self, folder: Path) -> None:
        """Downloads the published files of a folder below a work folder which are not there."""
        if not self.is_local:
            filesystem, root = self._location
            for remote in filesystem.find(f"{root}/{self._name(folder)}"):
                path = self.work_folder(".", ".") / str(remote).removeprefix(f"{root}/")
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    filesystem.get_file(remote, str(path))

    def ray_storage(self, kind: str, digest: str) -> tuple[str, pa_fs.FileSystem | None]:
        """Returns `storage_path` and `storage_filesystem` of Ray Train: a stage's `scratch/`."""
        if self.is_local:
            return str(self.work_folder(kind, digest) / SCRATCH), None
        filesystem, root = self._location
        handler = pa_fs.FSSpecHandler(filesystem)
        return f"{root}/{kind}/{digest}/{SCRATCH}", pa_fs.PyFileSystem(handler)

    @contextmanager
    def lease(self, kind: str, digest: str) -> Iterator[Callable[[], bool]]:
        """Holds a stage for this process; first waits until no other live process holds it.

        The lease is renewed by a thread. It is lost if it was not renewed for `LEASE_TIMEOUT_S`
        and another process has taken it over.

        Yields:
            A function that tells whether this process still holds the lease.
        """
        name = f"{kind}/{digest}/{LEASE}"
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex}"
        holder = ""
        while (other := self._acquire(name, owner)) != owner:
            if other != holder:
                holder = other
                host_and_pid = other.rpartition(":")[0]
                logger.warning("waiting for %s to finish %s %s", host_and_pid, kind, digest)
            time.sleep(SETTLE_S)
        if not self.is_local and self.manifest(kind, digest) is None:
            # The local copy of a stage that was removed from the store is an interrupted attempt.
            (self.work_folder(kind, digest) / MANIFEST).unlink(missing_ok=True)
        stopped = threading.Event()

        def is_held() -> bool:
            return (self._read_lease(name) or {}).get("owner") == owner

        def renew() -> None:
            while not stopped.wait(RENEWAL_S):
                try:
                    if not is_held():
                        logger.warning("lost the lease of %s %s", kind, digest)
                        return
                    self._write_lease(name, owner)
                except Exception as error:  # The next renewal may succeed.
                    logger.warning("cannot renew the lease of %s %s: %s", kind, digest, error)

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield is_held
        finally:
            stopped.set()
            thread.join()
            if is_held():
                self._remove(name)

    def _acquire(self, name: str, owner: str) -> str:
        """Tries to acquire a lease, and returns its owner."""
        lease = self._read_lease(name)
        if lease is not None and not _is_stale(lease):
            return str(lease["owner"])
        if lease is None and self.is_local:
            path = Path(self._location[1], name)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                return str((self._read_lease(name) or {"owner": ""})["owner"])
            self._write_lease(name, owner)
            return owner
        # Of the processes that found it free or stale, the one that writes last owns it.
        self._write_lease(name, owner)
        time.sleep(SETTLE_S)
        return str((self._read_lease(name) or {"owner": ""})["owner"])

    def _read_lease(self, name: str) -> dict[str, Any] | None:
        content = self._read(name)
        if content == b"":  # Created by `touch` above, and not yet written.
            with suppress(FileNotFoundError):
                return {"owner": "::", "time": Path(self._location[1], name).stat().st_mtime}
        lease: dict[str, Any] | None = json.loads(content) if content else None
        return lease

    def _write_lease(self, name: str, owner: str) -> None:
        lease = {"owner": owner, "pid_namespace": _pid_namespace(), "time": time.time()}
        self._write(name, json.dumps(lease).encode())

    def _name(self, path: Path) -> str:
        """Path below the root of the store."""
        return path.relative_to(self.work_folder(".", ".")).as_posix()

    def _read(self, name: str) -> bytes | None:
        filesystem, root = self._location
        try:
            return bytes(filesystem.cat_file(f"{root}/{name}"))
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: bytes) -> None:
        filesystem, root = self._location
        if not self.is_local:
            filesystem.pipe_file(f"{root}/{name}", content)
            return
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
        part.write_bytes(content)
        os.replace(part, path)

    def _remove(self, name: str) -> None:
        filesystem, root = self._location
        with suppress(FileNotFoundError):
            filesystem.rm_file(f"{root}/{name}")


def _is_stale(lease: Mapping[str, Any]) -> bool:
    host, pid, _ = str(lease["owner"]).split(":")
    # Numbers of processes mean nothing in another container.
    if host == socket.gethostname() and lease.get("pid_namespace") == _pid_namespace():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # It lives, and is another user's.
    return time.time() - float(lease["time"]) > LEASE_TIMEOUT_S


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder of the cache, against other processes and threads of the node."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
