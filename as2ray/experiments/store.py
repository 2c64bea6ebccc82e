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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from as2ray.distributed.node_files import NodeFiles
from as2ray.errors import ConfigError, StaleStageError, lookup
from as2ray.experiments.stage import Result, Stage
from as2ray.tables.atomic import atomic_file

FORMAT_VERSION = 3
"""Version of the manifest; a manifest of another version is refused."""
MANIFEST = "manifest.json"
LEASE = "lease.json"
SCRATCH = "scratch"
LINKS = "stages.json"
"""File of an output: kind, digest and inputs of each stage, by its name."""
OPENED = "opened_stages.txt"
"""File of an output: `KIND/DIGEST` of each stage that its runs started or took from the store."""
UNKNOWN = "::"
"""Owner of a lease that is being written."""

DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}
"""Schemes of object stores, and the package that fsspec needs for each."""

RENEWAL_S = 10.0
"""Seconds between two renewals of a lease."""
LEASE_TIMEOUT_S = 60.0
"""Seconds after which a lease that was not renewed is taken over."""
SETTLE_S = 1.0
"""Seconds after which all processes that write a lease see which of them wrote last."""
DIGEST = re.compile("[0-9a-f]{16}")
"""Digest of a stage. Other folders are no stages, and are neither listed nor removed."""
NUM_LOOKUPS = 32
"""Manifests that are read at the same time."""

log = logging.getLogger(__name__)


def read_links(output: str | Path) -> dict[str, Any]:
    """Returns kind, digest and inputs of each stage of an output by its name; empty without any.

    Raises:
        ConfigError: The file is damaged.
    """
    path = Path(output) / LINKS
    if not path.is_file():
        return {}
    try:
        links = json.loads(path.read_text(encoding="utf-8"))
        is_valid = all({"kind", "digest"} <= link.keys() for link in links.values())
    except (ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        problem = f"{path} is damaged: it does not list stages with their kinds and digests"
        raise ConfigError(problem, fix="remove it; the next run of its recipe writes it again")
    return dict(links)


@dataclass(frozen=True)
class StoredStage:
    """A stage's folder in a store."""

    kind: str
    digest: str
    num_bytes: int
    is_complete: bool
    """Whether it has a manifest; otherwise it is an interrupted or a running attempt."""
    has_lease: bool


@dataclass(frozen=True)
class Store(NodeFiles):
    """Finished stages in `URI/KIND/DIGEST`; a folder without a manifest is an interrupted attempt.

    Stages write local files. In a store on an object store, they write into a cache on the node,
    which is uploaded when they are finished. What an interrupted attempt has published, another
    node goes on with. Endpoints and credentials are settings of fsspec's
    drivers, such as AWS_ENDPOINT_URL and FSSPEC_S3_ENDPOINT_URL.

    Raises:
        ConfigError: The scheme is unknown, its driver is not installed, or the store is a file.
    """

    uri: str
    """A folder, or a URI: `file://`, `s3://`, `gs://`, `abfs://`."""
    cache: str = "~/.cache/as2ray/store"
    """Folder on each node with the files of an object store."""

    def __post_init__(self) -> None:
        match = re.match(r"([\w+.:-]+):/+(.*?)/*$", self.uri)
        if match is None or match[1] == "file":
            # Absolute, as workers of Ray have another working directory.
            path = self.uri if match is None else f"/{match[2]}"
            uri = str(Path(path).expanduser().absolute())
        else:
            uri, driver = f"{match[1]}://{match[2]}", lookup(DRIVERS, match[1], "scheme of a store")
            if find_spec(driver) is None:
                raise ConfigError(f"{uri} needs the package {driver}", f"pip install {driver}")
        object.__setattr__(self, "uri", uri)
        if self.is_local and Path(uri).is_file():
            raise ConfigError(f"store={uri} is a file", fix="name a folder")

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder, which stages write into directly."""
        return "://" not in self.uri

    @cached_property
    def _files(self) -> DirFileSystem:
        """The file system of the store; its paths start below the root."""
        # No cache of listings: other processes write to the store.
        filesystem, root = url_to_fs(self.uri, use_listings_cache=False)
        return DirFileSystem(root, filesystem)

    @property
    def _local_root(self) -> Path:
        cache = Path(self.cache).expanduser().resolve()
        return Path(self.uri) if self.is_local else cache / str(self._files.path)

    def work_folder(self, kind: str, digest: str) -> Path:
        """Returns the local folder that a stage writes into."""
        return self._local_root / kind / digest

    def manifest(self, kind: str, digest: str) -> dict[str, Any] | None:
        """Returns the manifest of a finished stage, or None.

        Raises:
            StaleStageError: The manifest is of another version.
        """
        content = self._read(f"{kind}/{digest}/{MANIFEST}")
        manifest: dict[str, Any] | None = None if content is None else json.loads(content)
        if manifest and (version := manifest.get("format_version")) != FORMAT_VERSION:
            raise StaleStageError(
                f"{self.uri}/{kind}/{digest} has format_version {version}; this version of as2ray "
                f"reads {FORMAT_VERSION}",
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

        def find(stage: Stage) -> Result | None:
            return self.find(stage, {each: results[each].fingerprint for each in stage.inputs})

        sorter = TopologicalSorter({stage: stage.inputs for stage in stages})
        sorter.prepare()
        with ThreadPoolExecutor(NUM_LOOKUPS) as pool:
            while sorter.is_active():
                ready = sorter.get_ready()
                known = [stage for stage in ready if results.keys() >= set(stage.inputs)]
                pairs = zip(known, pool.map(find, known))
                results |= {stage: result for stage, result in pairs if result}
                sorter.done(*ready)
        return results

    def fetch(self, result: Result) -> Path:
        """Returns a local folder with the files of a finished stage.

        Raises:
            StaleStageError: The stage was removed from the store.
        """
        kind, digest = result.kind, result.digest
        folder = self.work_folder(kind, digest)
        if self.is_local or (folder / MANIFEST).exists():
            return folder
        with _locked(folder):  # One process of a node downloads it, and the others wait.
            if not (folder / MANIFEST).exists():
                if (manifest := self.manifest(kind, digest)) is None:
                    raise StaleStageError(f"{self.uri}/{kind}/{digest} was removed")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                paths = [folder / name for name in manifest["files"]]
                self._files.get([self._name(path) for path in paths], [str(path) for path in paths])
                # Nodes compare their copies.
                self._files.get_file(self._name(folder / MANIFEST), str(folder / MANIFEST))
        return folder

    def commit(self, kind: str, digest: str, manifest: Mapping[str, Any]) -> None:
        """Finishes a stage: uploads its files, writes the manifest, then removes `scratch/`.

        Args:
            kind: Kind of the stage.
            digest: Its digest.
            manifest: Entries of the manifest, of which `outputs` is required; `format_version` and
                `files` (bytes by name) are added.
        """
        folder, name = self.work_folder(kind, digest), f"{kind}/{digest}"
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))]
        names = [each for each in names if not each.startswith((MANIFEST, LEASE, f"{SCRATCH}/"))]
        sizes = {n: (folder / n).stat().st_size for n in names if (folder / n).is_file()}
        entries = {"format_version": FORMAT_VERSION, **manifest, "files": sizes}
        content = (json.dumps(entries, indent=2) + "\n").encode()
        if self.is_local:
            self._write(f"{name}/{MANIFEST}", content)
        else:
            self._files.put([str(folder / f) for f in sizes], [f"{name}/{f}" for f in sizes])
            with _locked(folder):  # A process that fetches it waits for the local manifest.
                self._write(f"{name}/{MANIFEST}", content)
                (folder / MANIFEST).write_bytes(content)
            with suppress(FileNotFoundError):
                self._files.rm(f"{name}/{SCRATCH}", recursive=True)
        # After the manifest: a process that is killed here has lost nothing that is needed.
        shutil.rmtree(folder / SCRATCH, ignore_errors=True)

    def fetch_paths(self, paths: Iterable[str | Path]) -> None:
        """Downloads the stages to which local paths belong; other paths are left alone.

        Raises:
            StaleStageError: A stage was removed from the store.
        """
        for path in [] if self.is_local else map(Path, paths):
            if not path.is_relative_to(self._local_root):
                continue
            kind, digest, *_ = path.relative_to(self._local_root).parts
            if (self.work_folder(kind, digest) / MANIFEST).exists():
                continue
            if self.manifest(kind, digest) is None:  # Another node works on it.
                self.restore(path)
            else:
                self.fetch(Result(kind, digest, {}))

    def publish(self, path: Path) -> None:
        """Uploads a file or a folder below a work folder."""
        for each in [] if self.is_local else (path, *path.rglob("*")):
            with suppress(FileNotFoundError):  # It was removed or renamed meanwhile.
                if each.is_file():
                    self._files.put_file(str(each), self._name(each))

    def restore(self, folder: Path) -> None:
        """Downloads the published files of a folder or a file that differ in size from the local.

        What the store itself writes, the manifest and the lease, is left out.
        """
        if self.is_local:
            return
        for name, entry in self._files.find(self._name(folder), detail=True).items():
            path = self._local_root / name
            is_stored = path.exists() and path.stat().st_size == entry["size"]
            if not is_stored and path.name not in (MANIFEST, LEASE):
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as temporary:
                    self._files.get_file(name, str(temporary))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._local_root).as_posix()

    def stored_stages(self) -> list[StoredStage]:
        """Returns all stages of the store, by kind and digest.

        Raises:
            ConfigError: There are none, or the store cannot be read.
        """
        files: dict[tuple[str, ...], dict[str, int]] = {}
        with self._explained():
            entries = self._files.find("", detail=True)
        for path, entry in entries.items():
            if len(parts := path.split("/", 2)) == 3 and DIGEST.fullmatch(parts[1]):
                files.setdefault((parts[0], parts[1]), {})[parts[2]] = entry["size"]
        if not files:
            raise ConfigError(f"{self.uri} has no stages", fix="correct --store")
        return [
            StoredStage(kind, digest, sum(sizes.values()), MANIFEST in sizes, LEASE in sizes)
            for (kind, digest), sizes in sorted(files.items())
        ]

    def prune(self, outputs: Sequence[str | Path], dry_run: bool = False) -> list[StoredStage]:
        """Removes the stages that no output needs: none of its runs, also of those interrupted.

        Args:
            outputs: Folders of experiments' reports and links.
            dry_run: Whether nothing is removed.

        Returns:
            The stages that are removed.

        Raises:
            ConfigError: An output has no links or damaged ones, a stage is running, or a stage
                cannot be removed.
        """
        stages = self.stored_stages()
        names: list[str] = []
        for output in outputs:
            opened = Path(output) / OPENED
            if not (opened.is_file() or (Path(output) / LINKS).is_file()):
                raise ConfigError(f"{output} is no output: it has no {LINKS}", fix="correct --keep")
            names += [f"{link['kind']}/{link['digest']}" for link in read_links(output).values()]
            # An interrupted run has written no links, and stages such as scores have no name.
            names += opened.read_text(encoding="utf-8").split() if opened.is_file() else []
        needed: set[str] = set()
        while names:
            if (name := names.pop()) not in needed:
                needed.add(name)
                names += (self.manifest(*name.split("/")) or {}).get("built_on", [])
        for stage in [each for each in stages if each.has_lease]:
            lease = self._read_lease(f"{stage.kind}/{stage.digest}/{LEASE}")
            if lease and not _is_stale(lease):
                problem = f"{_process(lease['owner'])} is running {stage.kind}/{stage.digest}"
                raise ConfigError(f"{problem} in {self.uri}", fix="wait until it is finished")
        removed = [stage for stage in stages if f"{stage.kind}/{stage.digest}" not in needed]
        for stage in [] if dry_run else removed:
            try:
                self.remove(stage.kind, stage.digest)
            except OSError as error:
                problem = f"cannot remove {stage.kind}/{stage.digest} from {self.uri}: {error}"
                raise ConfigError(problem, fix="prune it where you may write into it") from error
        return removed

    def remove(self, kind: str, digest: str) -> None:
        """Removes a stage; its manifest first, as a complete stage has all its files."""
        self._delete(f"{kind}/{digest}/{MANIFEST}")
        with suppress(FileNotFoundError):  # An object store has no empty folders.
            self._files.rm(f"{kind}/{digest}", recursive=True)

    def train_storage(self, folder: Path) -> tuple[str, pa_fs.FileSystem | None]:
        """See `NodeFiles`; the folder is one below a work folder."""
        if self.is_local:
            return str(folder), None
        filesystem = pa_fs.PyFileSystem(pa_fs.FSSpecHandler(self._files.fs))
        return f"{self._files.path}/{self._name(folder)}", filesystem

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
        holder = UNKNOWN
        while (other := self._acquire(name, owner)) != owner:
            if other not in (holder, UNKNOWN):
                holder = other
                log.warning("waiting for %s to finish %s %s", _process(other), kind, digest)
            time.sleep(SETTLE_S)
        if not self.is_local and self.manifest(kind, digest) is None:
            # The local copy of a stage that was removed from the store is an interrupted attempt.
            (self.work_folder(kind, digest) / MANIFEST).unlink(missing_ok=True)
        stopped = threading.Event()

        def is_held() -> bool:
            return self._read_lease(name).get("owner") == owner

        def renew() -> None:
            while not stopped.wait(RENEWAL_S):
                try:
                    if not is_held():
                        log.warning("lost the lease of %s %s", kind, digest)
                        return
                    self._write_lease(name, owner)
                except Exception as error:  # The next renewal may succeed.
                    log.warning("cannot renew the lease of %s %s: %s", kind, digest, error)

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield is_held
        finally:
            stopped.set()
            thread.join()
            if is_held():
                self._delete(name)

    def _acquire(self, name: str, owner: str) -> str:
        """Tries to acquire a lease, and returns its owner."""
        lease = self._read_lease(name)
        if lease and not _is_stale(lease):
            return str(lease["owner"])
        if self.is_local and not lease:
            path = self._local_root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                return UNKNOWN
            try:
                self._write_lease(name, owner)
            except OSError:  # Others would wait for who writes it.
                path.unlink()
                raise
            return owner
        # Of the processes that found it free or stale, the one that writes last owns it.
        self._write_lease(name, owner)
        time.sleep(SETTLE_S)
        return str(self._read_lease(name).get("owner", UNKNOWN))

    def _read_lease(self, name: str) -> dict[str, Any]:
        content = self._read(name)
        if content == b"":  # Created on a disk, and not yet written.
            with suppress(FileNotFoundError):
                return {"owner": UNKNOWN, "time": (self._local_root / name).stat().st_mtime}
        return dict(json.loads(content or "{}"))

    def _write_lease(self, name: str, owner: str) -> None:
        lease = {"owner": owner, "pid_namespace": _pid_namespace(), "time": time.time()}
        self._write(name, json.dumps(lease).encode())

    def _read(self, name: str) -> bytes | None:
        with self._explained():
            try:
                return bytes(self._files.cat_file(name))
            except FileNotFoundError:
                return None

    def _write(self, name: str, content: bytes) -> None:
        if not self.is_local:
            with self._explained():
                self._files.pipe_file(name, content)
            return
        path = self._local_root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
        try:
            part.write_bytes(content)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(name)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Names the store in the errors of an object store, such as missing credentials."""
        try:
            yield
        except Exception as error:
            if self.is_local:
                raise
            raise ConfigError(
                f"store {self.uri}: {error}", fix="check its bucket, credentials and endpoint"
            ) from error


def _process(owner: str) -> str:
    """Host and process of a lease's owner."""
    return owner.rpartition(":")[0]


def _is_stale(lease: Mapping[str, Any]) -> bool:
    host, _, pid = _process(lease["owner"]).rpartition(":")
    # Another container's numbers of processes mean nothing here.
    if host == socket.gethostname() and lease.get("pid_namespace") == _pid_namespace():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # It runs, as another user.
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
