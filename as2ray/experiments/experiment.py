"""An experiment: named stages, the evaluations that reports compare, and how it is run."""

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from as2ray.errors import ConfigError, StaleStageError
from as2ray.evaluation.measures import EvaluationResult
from as2ray.experiments.executor import (
    Backend,
    GraphRun,
    check_stage,
    git_commit,
    package_versions,
    run_graph,
)
from as2ray.experiments.rankers import load_evaluation
from as2ray.experiments.stage import Label, Outputs, Stage, sorted_stages
from as2ray.experiments.store import LINKS, OPENED, Store, read_links
from as2ray.tables.atomic import atomic_file

S = TypeVar("S", bound=Stage)

RUN_FILE = "run.json"
"""File in the output that says when, where and from which commit the reports were written."""

Evaluations = dict[str, dict[str, dict[int, EvaluationResult]]]
"""Evaluations by test, system and seed."""


@dataclass
class Experiment:
    """Stages by the names under which an output folder shows them."""

    stages: dict[str, Stage] = field(default_factory=dict)
    evaluations: dict[tuple[str, str, int], tuple[Stage, str]] = field(default_factory=dict)
    """By test, system and seed: the stage with the evaluation, and its name in that stage."""

    def add(self, name: str, stage: S) -> S:
        """Names a stage, which will run with all that it builds on; returns it."""
        self.stages[name] = stage
        return stage

    def compare(self, test: str, system: str, seed: int, stage: Stage, name: str = "") -> None:
        """Adds an evaluation to the reports.

        Args:
            test: Name of the test.
            system: Name of the system.
            seed: Seed of its run.
            stage: Stage that stored the evaluation.
            name: Name of the evaluation in that stage, if it stored several.
        """
        self.evaluations[test, system, seed] = (stage, name)

    @property
    def targets(self) -> list[Stage]:
        """All stages that must be complete, in the order of the recipe."""
        return [*self.stages.values(), *(stage for stage, _ in self.evaluations.values())]

    def names(self) -> dict[Stage, str]:
        """Returns a name of each stage, for logs; inputs without a name have that of their user."""
        names = {stage: name for name, stage in reversed(self.stages.items())}
        for (test, system, seed), (stage, _) in self.evaluations.items():
            names.setdefault(stage, f"{system}-seed{seed} on {test}")
        for stage in reversed(sorted_stages(self.targets)):
            for each in stage.inputs:
                user = names[stage].removeprefix(f"{stage.kind} for ")
                names.setdefault(each, f"{each.kind} for {user}")
        return names


@dataclass(frozen=True)
class Finished:
    """What reports read: the stages that are complete."""

    experiment: Experiment
    run: GraphRun
    store: Store
    output: Path
    """Folder of the reports."""

    def has(self, stage: Stage) -> bool:
        """Returns whether a stage is complete."""
        return stage in self.run.results

    def outputs(self, stage: Stage) -> Outputs:
        """Returns what a stage reported."""
        return self.run.results[stage].outputs

    def path(self, stage: Stage) -> Path:
        """Returns a local folder with the files of a stage."""
        return self.store.fetch(self.run.results[stage])

    def parameters(self, test: str) -> dict[str, int]:
        """Returns the number of weights of the systems of a test that have any, by system."""
        counts: dict[str, int] = {}
        for (of_test, system, _), (stage, _) in self.experiment.evaluations.items():
            if of_test == test and self.has(stage) and system not in counts:
                rankers = self._find_rankers(stage)
                counts[system] = sum(self.outputs(each)["parameters"] for each in rankers)
        return {system: count for system, count in counts.items() if count}

    def _find_rankers(self, stage: Stage) -> set[Stage]:
        """Returns the nearest stages with weights that a stage builds on, or the stage itself."""
        if not self.has(stage):
            return set()
        if "parameters" in self.outputs(stage):
            return {stage}
        return {each for input in stage.inputs for each in self._find_rankers(input)}

    def named(self, prefix: str) -> dict[str, Stage]:
        """Returns the complete stages whose names start with a prefix, by the rest of the name."""
        return {
            name.removeprefix(prefix): stage
            for name, stage in self.experiment.stages.items()
            if name.startswith(prefix) and self.has(stage)
        }

    def write(self, name: str, text: str) -> None:
        """Writes a text file into the output."""
        (self.output / name).write_text(text + "\n", encoding="utf-8")

    def write_json(self, name: str, values: Any) -> None:
        """Writes a JSON file into the output."""
        self.write(name, json.dumps(values, indent=2))

    def evaluations(self) -> Evaluations:
        """Returns the evaluations that are complete, in the order of the recipe."""
        results: Evaluations = {}
        for (test, system, seed), (stage, name) in self.experiment.evaluations.items():
            if self.has(stage):
                result = load_evaluation(self.run.results[stage], self.store, name)
                results.setdefault(test, {}).setdefault(system, {})[seed] = result
        return results


def check_experiment(experiment: Experiment, output: str | Path, store: Store) -> None:
    """Checks what needs no cluster, so that none is started in vain.

    Raises:
        As2rayError: The output is of another recipe, or a stage that has to run cannot.
    """
    _check_same_recipe(experiment, Path(output).resolve())
    stages, names = sorted_stages(experiment.targets), experiment.names()
    results = store.find_all(stages)
    for stage in stages:
        if stage not in results:
            check_stage(stage, results, names)


def run_experiment(
    experiment: Experiment,
    output: str | Path,
    store: Store,
    backend: Backend,
    report: Callable[[Finished], None],
    fail_fast: bool = False,
    title: str = Label.experiment,
) -> Finished:
    """Runs what the store does not have, links it under its names, and writes the reports.

    A stage is linked when it starts, so that TensorBoard finds the files of running stages.

    Args:
        experiment: Its stages and evaluations.
        output: Folder of the reports and links.
        store: Where the stages are stored.
        backend: Where they run.
        report: Writes the reports of what is complete.
        fail_fast: Whether no further stage starts after the first failure.
        title: Title of the recipe.

    Raises:
        StaleStageError: The output shows another recipe's stage under one of the names.
        As2rayError: A stage failed; the others are complete, and the reports are written.
    """
    output = Path(output).resolve()
    _check_same_recipe(experiment, output)
    opened = set((output / OPENED).read_text().split()) if (output / OPENED).is_file() else set()

    def link(stage: Stage, digest: str) -> None:
        if (name := f"{stage.kind}/{digest}") not in opened:
            opened.add(name)
            output.mkdir(parents=True, exist_ok=True)
            with (output / OPENED).open("a") as file:
                file.write(f"{name}\n")
        for name in [n for n, each in experiment.stages.items() if each == stage]:
            if store.is_local:
                path = output / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                folder = store.work_folder(stage.kind, digest)
                path.symlink_to(os.path.relpath(folder, path.parent))

    names = experiment.names()
    run = run_graph(experiment.targets, store, backend, names, fail_fast, title, link)
    _write_links(experiment, output, run)
    finished = Finished(experiment, run, store, output)
    # Before the reports, which may be sent to a tracker with all files of the output.
    finished.write_json(RUN_FILE, _describe_run(experiment, title))
    report(finished)
    run.raise_failures(names)
    return finished


def _describe_run(experiment: Experiment, title: str) -> dict[str, Any]:
    import torch  # takes seconds, and `--help` needs it not

    return {
        "title": title,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": sys.argv,
        "seeds": sorted({seed for _, _, seed in experiment.evaluations}),
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "packages": package_versions(),
    }


def _check_same_recipe(experiment: Experiment, output: Path) -> None:
    """Names the keys that differ in the first stage that differs; later ones differ by it."""
    if output.is_file():
        raise ConfigError(f"output={output} is a file", fix="name a folder")
    links, names = read_links(output), experiment.names()
    for stage, identity in _identities(experiment).items():
        stored = _leaves(links.get(names[stage], {}).get("inputs", {}))
        current = _leaves(identity)
        keys = sorted(stored.keys() | current.keys())
        changed = [key for key in keys if stored.get(key) != current.get(key)]
        if stored and changed:
            changes = [f"{key}: {stored.get(key)!r} -> {current.get(key)!r}" for key in changed[:8]]
            raise StaleStageError(
                f"{output / names[stage]} is of another recipe; {len(changed)} keys differ "
                f"(output -> recipe): {'; '.join(changes)}",
                fix="choose another --output; what both recipes share is not made again",
            )


def _identities(experiment: Experiment) -> dict[Stage, dict[str, Any]]:
    """Returns the identity of each named stage, inputs first; it contains those of unnamed inputs.

    So a key of an unnamed stage that differs is told as itself, and not as another hash.
    """
    named = set(experiment.stages.values())
    unnamed: dict[Stage, Any] = {}
    identities: dict[Stage, Any] = {}
    for stage in sorted_stages(experiment.targets):
        group = identities if stage in named else unnamed
        group[stage] = stage.identity(unnamed)
    return identities


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {k: v for key in value for k, v in _leaves(value[key], f"{path}.{key}").items()}
    return {path.removeprefix("."): value}


def _write_links(experiment: Experiment, output: Path, run: GraphRun) -> None:
    """Writes which complete stage stands for each name."""
    output.mkdir(parents=True, exist_ok=True)
    links, identities = read_links(output), _identities(experiment)
    for name, stage in experiment.stages.items():
        if not (result := run.results.get(stage)):
            continue
        links[name] = {"kind": stage.kind, "digest": result.digest, "inputs": identities[stage]}
    with atomic_file(output / LINKS) as temporary:
        temporary.write_text(json.dumps(links, indent=2) + "\n")
