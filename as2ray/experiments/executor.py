"""Runs the stages of a graph, in order or at the same time, each once, resumed or reused."""

import errno
import heapq
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import As2rayError, ConfigError
from as2ray.experiments.stage import (
    Label,
    Result,
    Stage,
    StageContext,
    critical_paths,
    plain,
    sorted_stages,
)
from as2ray.experiments.store import Store
from as2ray.progress import fields, format_duration

log = logging.getLogger(__name__)

PACKAGES = ("as2ray", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy")


DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Errors of a disk that is full, may not hold more, or cannot be written."""


class ExperimentError(As2rayError):
    """Some stages of an experiment failed; the others are complete."""


def execute(
    stage: Stage,
    inputs: Mapping[Stage, Result],
    store: Store,
    workers: WorkersConfig,
    label: Label = Label(),  # noqa: B008
) -> Result:
    """Runs a stage unless the store has it; the same in this process and in a task of Ray.

    Args:
        stage: The stage.
        inputs: Results of all stages that it builds on.
        store: Where its files and its manifest go.
        workers: Part of the cluster that it may use.
        label: What the experiment calls it.

    Raises:
        ConfigError: The disk of the store is full, or the store cannot be written.
    """
    fingerprints = {each: result.fingerprint for each, result in inputs.items()}
    digest = stage.digest(fingerprints)
    with _disk_errors(store), store.lease(stage.kind, digest) as is_held:
        if (stored := store.find(stage, fingerprints)) is not None:
            stage.verify(stored)
            return stored
        folder = store.work_folder(stage.kind, digest)
        folder.mkdir(parents=True, exist_ok=True)
        started_at = time.perf_counter()
        outputs = stage.run(StageContext(folder, inputs, store, workers, label))
        result = Result(stage.kind, digest, plain(outputs or {}))
        manifest = {
            "inputs": stage.identity(fingerprints),
            "outputs": result.outputs,
            "built_on": [f"{each.kind}/{each.digest}" for each in inputs.values()],
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "duration_s": round(time.perf_counter() - started_at, 2),
            "workers": plain(workers),
            "command": sys.argv,
            "packages": package_versions(),
            "git_commit": git_commit(),
        }
        if is_held():
            store.commit(stage.kind, digest, manifest)
            return result
    # Another process has taken the stage over, and this one waits for its result.
    return execute(stage, inputs, store, workers, label)


@contextmanager
def _disk_errors(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_denied = error.errno == errno.EACCES and str(error.filename).startswith(store.uri)
        if error.errno not in DISK_ERRORS and not is_denied:
            raise
        fix = "make room there and in TMPDIR, or choose a --store that you may write into"
        fix += "; the run resumes"
        raise ConfigError(f"nothing can be written into {store.uri}: {error}", fix) from error


class Backend(Protocol):
    """Where stages run."""

    max_parallel: int
    """Maximum number of stages that run at the same time; 1 keeps the recipe's order."""

    def check(self, stages: Sequence[Stage]) -> None:
        """Checks before anything starts that these stages can run; raises with numbers if not."""

    def admits(self, stage: Stage, running: Sequence[Stage]) -> bool:
        """Returns whether a stage may start beside those that run."""

    def submit(self, stage: Stage, inputs: Mapping[Stage, Result], label: Label) -> Any:
        """Starts a stage; returns a handle to wait for."""

    def wait(self, handles: Sequence[Any]) -> Any:
        """Returns one of the handles whose stage has ended."""

    def result(self, handle: Any) -> Result:
        """Returns the result of an ended stage, or raises its error."""


@dataclass
class SequentialBackend:
    """Runs one stage after the other in this process, without Ray."""

    store: Store
    workers: WorkersConfig
    max_parallel: int = 1

    def check(self, stages: Sequence[Stage]) -> None:
        """See `Backend`."""

    def admits(self, stage: Stage, running: Sequence[Stage]) -> bool:
        """See `Backend`."""
        return not running

    def submit(self, stage: Stage, inputs: Mapping[Stage, Result], label: Label) -> Any:
        """See `Backend`."""
        return partial(execute, stage, inputs, self.store, self.workers, label)

    def wait(self, handles: Sequence[Any]) -> Any:
        """See `Backend`."""
        return handles[0]

    def result(self, handle: Any) -> Result:
        """See `Backend`."""
        result: Result = handle()
        return result


@dataclass
class GraphRun:
    """What came of a graph."""

    results: dict[Stage, Result] = field(default_factory=dict)
    failures: dict[Stage, Exception] = field(default_factory=dict)
    skipped: list[Stage] = field(default_factory=list)
    """Stages that did not start, because they build on one that failed."""

    def raise_failures(self, names: Mapping[Stage, str]) -> None:
        """Raises the only error, or one error that lists all by the names of their stages."""
        if len(self.failures) == 1:
            raise next(iter(self.failures.values()))
        if self.failures:
            causes = "; ".join(
                f"{_name(stage, names)}: {(str(error) or repr(error)).splitlines()[0]}"
                for stage, error in self.failures.items()
            )
            count = f"{len(self.failures)} stages failed, and {len(self.skipped)} build on them"
            raise ExperimentError(
                f"{count}: {causes}",
                fix="correct the causes and run again; complete stages are not repeated",
            )


def run_graph(
    targets: Sequence[Stage],
    store: Store,
    backend: Backend,
    names: Mapping[Stage, str] | None = None,
    fail_fast: bool = False,
    title: str = Label.experiment,
    on_open: Callable[[Stage, str], None] = lambda stage, digest: None,
) -> GraphRun:
    """Runs all stages that the targets need and the store does not have.

    One at a time they keep the given order; otherwise the longest chain goes first, and nothing
    passes the head of the queue. A stage that fails ends those that build on it and no others.

    Args:
        targets: The stages to complete.
        store: Where stages are stored.
        backend: Where they run.
        names: Names of stages, for the log.
        fail_fast: Whether no further stage starts after the first failure.
        title: Title of the recipe.
        on_open: Called with a stage and its digest when it starts, or is found in the store.

    Raises:
        As2rayError: A source of a complete stage has changed, or a stage cannot run; nothing has
            started then.
    """
    names, everything = names or {}, sorted_stages(targets)
    run = GraphRun(store.find_all(everything))
    for stage, result in run.results.items():
        stage.verify(result)
        on_open(stage, result.digest)
    stages = [stage for stage in everything if stage not in run.results]
    for stage in stages:
        check_stage(stage, run.results, names)
    if stages:
        backend.check(stages)
    log.info("%d stages: %d complete, %d to run", len(everything), len(run.results), len(stages))
    hours = critical_paths(everything) if backend.max_parallel > 1 else dict.fromkeys(stages, 0.0)
    places = {stage: (-hours[stage], number) for number, stage in enumerate(stages)}
    sorter = TopologicalSorter({s: [i for i in s.inputs if i in places] for s in stages})
    sorter.prepare()
    ready: list[tuple[tuple[float, int], Stage]] = []  # a heap; no two stages have one place
    running: dict[Any, Stage] = {}
    stage_log = _StageLog(names, len(everything))
    while sorter.is_active():
        for stage in sorter.get_ready():
            heapq.heappush(ready, (places[stage], stage))
        if fail_fast and run.failures:
            ready.clear()
        while ready and backend.admits(ready[0][1], list(running.values())):
            _, stage = heapq.heappop(ready)
            stage_log.start(stage, len(run.results) + len(run.failures) + len(running) + 1)
            # All that it builds on: a stage may read the inputs of its inputs.
            inputs = {each: run.results[each] for each in sorted_stages(stage.inputs)}
            on_open(stage, stage.digest({each: inputs[each].fingerprint for each in inputs}))
            label = Label(title, names.get(stage, ""))
            running[backend.submit(stage, inputs, label)] = stage
        if not running:
            break
        handle = backend.wait(list(running))
        stage = running.pop(handle)
        try:
            run.results[stage] = backend.result(handle)
        except Exception as error:  # Other stages go on; it is raised at the end.
            run.failures[stage] = error
            stage_log.fail(stage, error)
        else:
            sorter.done(stage)
            stage_log.complete(stage, len(run.results))
    run.skipped = [s for s in stages if s not in run.results and s not in run.failures]
    stage_log.close(len(run.results))
    return run


class _StageLog:
    """Logs the start and the end of each stage, and a summary."""

    def __init__(self, names: Mapping[Stage, str], num_stages: int) -> None:
        self._names, self._num_stages = names, num_stages
        self._started_at: dict[Stage, float] = {}
        self._durations_s: dict[str, float] = {}

    def start(self, stage: Stage, position: int) -> None:
        self._started_at[stage], name = time.monotonic(), _name(stage, self._names)
        place = {"position": position, "num_stages": self._num_stages}
        log.info("%s: started", name, extra=fields(task=name, state="started", **place))

    def fail(self, stage: Stage, error: Exception) -> None:
        name, is_bug = _name(stage, self._names), not isinstance(error, As2rayError)
        full = f"{name}: failed: {error}"
        ended = fields(task=name, state="failed", full=full)
        log.error("%s", full.partition("\n")[0], exc_info=is_bug, extra=ended)

    def complete(self, stage: Stage, num_complete: int) -> None:
        name, seconds = _name(stage, self._names), time.monotonic() - self._started_at[stage]
        self._durations_s[name] = round(seconds, 2)
        place = {"num_complete": num_complete, "num_stages": self._num_stages}
        ended = fields(task=name, state="complete", duration_s=self._durations_s[name], **place)
        shown = (name, num_complete, self._num_stages, format_duration(seconds))
        log.info("%s: complete (%d of %d), %s", *shown, extra=ended)

    def close(self, num_complete: int) -> None:
        if self._started_at:
            seconds = time.monotonic() - min(self._started_at.values())
            summary = fields(durations_s=self._durations_s, duration_s=round(seconds, 2))
            shown = (num_complete, self._num_stages, format_duration(seconds))
            log.info("%d of %d stages complete, %s", *shown, extra=summary)


def check_stage(stage: Stage, results: Mapping[Stage, Result], names: Mapping[Stage, str]) -> None:
    """Checks before anything starts that a stage can run; raises its error with its name."""
    try:
        stage.check(results)
    except As2rayError as error:
        raise type(error)(f"{_name(stage, names)!r}: {error.problem}", error.fix) from None


def _name(stage: Stage, names: Mapping[Stage, str]) -> str:
    return names.get(stage, stage.kind)


@cache
def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that results depend on, of those installed."""
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


@cache
def git_commit() -> str | None:
    """Returns the commit of the code, with `+` if files differ from it; None without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    describe = [*git, "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
