"""Stages: the nodes of an experiment's graph, each a frozen configuration and what it makes."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from as2ray.distributed.workers_config import WorkersConfig
    from as2ray.experiments.store import Store

Outputs = Mapping[str, Any]
"""What a stage reports about its files, as plain values; the manifest stores it."""

Resources = Literal["cpu", "data", "device", "gang", "pool"]
"""What a stage takes of a cluster: a task with one CPU, tasks of Ray Data on any nodes, a task with
the CPUs and GPUs of a training worker, training workers, or scoring actors."""

NOT_IDENTITY = {"identity": False}
"""Metadata of a field that does not change the result: order-only inputs, tracking, places."""


@dataclass(frozen=True)
class Result:
    """A finished stage: where its files are stored, and what it reported."""

    kind: str
    digest: str
    outputs: Outputs

    @property
    def fingerprint(self) -> str:
        """What represents it in the identity of later stages: its content, or its digest."""
        return str(self.outputs.get("content", self.digest))


@dataclass(frozen=True)
class Label:
    """What an experiment calls a stage, which is not part of its identity."""

    experiment: str = "as2ray"
    """Title of the recipe."""
    name: str = ""
    """Name of the stage in the output folder."""


@dataclass(frozen=True)
class StageContext:
    """What a stage is given when it runs."""

    output: Path
    """Folder of its files. It still contains what an interrupted attempt left."""
    inputs: Mapping["Stage", Result]
    """Results of all stages that it builds on."""
    store: "Store"
    workers: "WorkersConfig"
    label: Label = Label()

    @property
    def scratch(self) -> Path:
        """Folder from which an interrupted attempt resumes; removed once the stage is complete."""
        return self.output / "scratch"

    def path(self, stage: "Stage") -> Path:
        """Returns a local folder with the files of an input."""
        return self.store.fetch(self.inputs[stage])

    def outputs(self, stage: "Stage") -> Outputs:
        """Returns what an input reported."""
        return self.inputs[stage].outputs


@dataclass(frozen=True, eq=False)
class Stage:
    """Base of all nodes. Fields are the identity; a field that holds stages names its inputs.

    Two stages of equal identity are equal, whoever made them: a run that two recipes list is one.
    """

    VERSION: ClassVar[int] = 1
    """Raised when the code gives another result for the same configuration."""
    RESOURCES: ClassVar[Resources] = "cpu"

    def run(self, context: StageContext) -> Outputs | None:
        """Writes the files of the stage into `context.output`."""
        raise NotImplementedError

    def verify(self, result: Result) -> None:
        """Checks a finished stage before it is used again; raises if its source has changed."""

    def check(self, results: Mapping["Stage", Result]) -> None:
        """Checks before anything starts that the stage can run; raises if it cannot.

        Args:
            results: Stages that are complete already.
        """

    def describe(self) -> Mapping[str, Any]:
        """Returns columns of the dry run, which are known without data or models.

        A stage stands for its name; `source` is a line about what is read.
        """
        return {}

    def hours(self) -> float:
        """Returns the estimated duration on one device, in hours; it orders what is ready."""
        return 0.0

    @property
    def kind(self) -> str:
        """Name of the node type."""
        return type(self).__name__

    @cached_property
    def inputs(self) -> tuple["Stage", ...]:
        """Stages whose files it reads, or that must succeed before it."""
        values = [getattr(self, field.name) for field in fields(self)]
        return tuple(dict.fromkeys(_iter_stages(values)))

    def identity(self, fingerprints: Mapping["Stage", str]) -> dict[str, Any]:
        """Returns everything that changes the result, as plain values.

        Args:
            fingerprints: Fingerprints of its inputs; the key represents an input without one.
        """
        names = [field.name for field in fields(self) if field.metadata.get("identity", True)]
        values = {name: plain(getattr(self, name), fingerprints) for name in names}
        return {"kind": self.kind, "version": self.VERSION, **values}

    def digest(self, fingerprints: Mapping["Stage", str]) -> str:
        """Returns the name of its folder in the store."""
        text = json.dumps(self.identity(fingerprints), sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def key(self) -> str:
        """Digest of the configuration alone, known before anything has run."""
        return self.digest({})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stage) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _iter_stages(value: Any) -> Iterator[Stage]:
    if isinstance(value, Stage):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_stages(item)


def plain(value: Any, fingerprints: Mapping[Stage, str] | None = None) -> Any:
    """Converts dataclasses, tuples, paths and stages to what JSON returns, so that they compare."""
    if isinstance(value, Stage):
        return (fingerprints or {}).get(value, value.key)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v, fingerprints) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, fingerprints) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def sorted_stages(targets: Iterable[Stage]) -> list[Stage]:
    """Returns the targets and all that they build on, inputs first, else in the given order."""
    visited: dict[Stage, None] = {}

    def visit(stage: Stage) -> None:
        if stage not in visited:
            for each in stage.inputs:
                visit(each)
            visited[stage] = None

    for target in targets:
        visit(target)
    return list(visited)


def critical_paths(stages: Iterable[Stage]) -> dict[Stage, float]:
    """Returns the hours from the start of each stage to the end of the longest chain it begins."""
    stages = sorted_stages(stages)
    hours = dict.fromkeys(stages, 0.0)
    for stage in reversed(stages):  # Its users come first, so the chains behind it are known.
        hours[stage] += stage.hours()
        for each in stage.inputs:
            hours[each] = max(hours[each], hours[stage])
    return hours
