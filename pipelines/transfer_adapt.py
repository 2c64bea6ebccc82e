"""Transfer and adapt (TANDA): prepare tables, train steps that build on each other, report.

    python -m pipelines.transfer_adapt --config pipelines/recipes/tanda_minilm.yaml --output DIR

Every step is a system of the results table. A step starts from the model, or from an earlier
step: transfer, then adapt. Tables 3 to 7 and Figure 4 of the paper are recipes.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from as2ray import corpora
from as2ray.distributed.cluster import Workers, connected
from as2ray.errors import RecipeError
from as2ray.evaluation import plots
from as2ray.evaluation.measures import Evaluation
from as2ray.evaluation.report import markdown, report, save
from as2ray.filters import Filter
from as2ray.objectives import Distillation
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import Tracking, read
from pipelines.recipe import Data, Leaks, read_recipe
from pipelines.steps import evaluated, prepared, table, taught, trained

log = logging.getLogger(__name__)

Found = dict[str, dict[str, dict[int, Evaluation]]]
"""Evaluations by test, system and seed."""


@dataclass(frozen=True)
class Step:
    """One training run, and a row of the results."""

    train: list[str]
    """Names of the tables to train on; several are one corpus (a union)."""
    training: Training = field(default_factory=Training)
    """Its settings."""
    start: str | None = None
    """The step whose ranker it starts from; by default the recipe's model."""
    dev: str | None = None
    """The table that selects its best checkpoint; by default the recipe's."""
    model: str | None = None
    """Another encoder or ranker to start from than the recipe's: a folder or a hub id."""
    layers: int | None = None
    """Keep the first layers only."""
    exits: tuple[int, ...] | None = None
    """Make a cascade with exits after these layers; a step that starts from one goes on with it."""
    heads: int = 0
    """CERBERUS's heads after the last exit: a copy each of the layers above it."""
    objective: str | Distillation = "cross_entropy"
    """Name of the loss; a cascade's is `uniform_exit` in the paper. Or distillation's settings."""
    teachers: list[str] = field(default_factory=list)
    """Steps before it whose rankers' stored logits it learns from."""
    seeds: list[int] | None = None
    """Those of the recipe's seeds that it is trained with; by default all."""


@dataclass(frozen=True)
class Recipe:
    """Transfer and adapt: what to prepare, which steps to train, what to compare."""

    title: str
    """Heading of the report."""
    model: Model
    """What to start from."""
    tables: dict[str, Data]
    """Tables by name."""
    dev: str
    """Name of the table that selects checkpoints."""
    tests: list[str]
    """Names of the tables that are reported."""
    steps: dict[str, Step]
    """Steps by name, each after those it starts from."""
    baseline: str | dict[str, str]
    """Step against which the others are tested, or for each test its own."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Each step is trained once with each."""
    measures: list[str] = field(default_factory=lambda: ["AP", "RR", "P@1"])
    """Names of ir-measures."""
    filter: Filter = "clean"
    """Questions of the tests that count."""
    leaks: Leaks = "error"
    """What to do with training questions that stand in a dev or test table."""
    curves: bool = False
    """Follow the tests' MAP during training and draw it (Figure 4); selects nothing by it."""
    published: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """For each test, numbers that papers print, by name and measure."""
    tracking: Tracking = field(default_factory=Tracking)
    """What follows the runs."""

    def __post_init__(self) -> None:
        names = {self.dev, *self.tests}
        for name, step in self.steps.items():
            if not re.fullmatch(r"[\w.+-]+", name):
                raise RecipeError(
                    f"a step named {name!r}",
                    expected="letters, digits and . + - _: it names folders and runs",
                    mend="rename it",
                )
            names |= {*step.train, *([step.dev] if step.dev else [])}
            before = list(self.steps)[: list(self.steps).index(name)]
            needed = [*([step.start] if step.start else []), *step.teachers]
            if not set(needed) <= set(before):
                raise RecipeError(
                    f"step {name!r} starts from {step.start!r} and learns from {step.teachers}",
                    expected=f"steps before it: {before}",
                    mend="put the steps in order",
                )
            there = set(self.seeds).intersection(*(self.seeds_of(other) for other in needed))
            if not set(self.seeds_of(name)) <= there:
                raise RecipeError(
                    f"step {name!r} with seeds {step.seeds}",
                    expected=f"some of {sorted(there)}: the recipe's, its start's, its teachers'",
                    mend="correct the step's seeds",
                )
        if unknown := sorted(names - self.tables.keys()):
            raise RecipeError(
                f"tables {unknown} are named but not described",
                expected=f"some of {sorted(self.tables)}",
                mend="describe them under `tables`",
            )
        baselines = {test: self.against(test) for test in self.tests}
        if wrong := {t: b for t, b in baselines.items() if b not in self.steps}:
            raise RecipeError(
                f"baseline {wrong}",
                expected=f"one of {list(self.steps)}",
                mend="name one",
            )

    def seeds_of(self, step: str) -> list[int]:
        """The seeds that a step is trained with."""
        own = self.steps[step].seeds
        return self.seeds if own is None else own

    def against(self, test: str) -> str | None:
        """The baseline of a test."""
        return self.baseline if isinstance(self.baseline, str) else self.baseline.get(test)


def run(
    recipe: Recipe, output: str | Path, workers: Workers, sources: Mapping[str, str] | None = None
) -> None:
    """Runs what is not there yet, and writes the report.

    Args:
        recipe: What to do.
        output: Folder of the stages.
        workers: What to take of the cluster.
        sources: For each corpus its folder; by default its place in AS2RAY_DATA.
    """
    folder = Path(output).resolve()
    tables = prepare(recipe, folder / "tables", sources or {})
    found: Found = {test: {} for test in recipe.tests}
    for name, seed, stage in rankers(recipe, folder, workers, tables):
        tests = {test: tables[test] for test in recipe.tests}
        runs = folder / "runs" / stage.name
        evaluations = evaluated(runs, stage, tests, recipe.measures, recipe.filter)
        for test, evaluation in evaluations.items():
            found[test].setdefault(name, {})[seed] = evaluation
    tell(recipe, folder, found)


def rankers(
    recipe: Recipe, folder: Path, workers: Workers, tables: Mapping[str, Path]
) -> Iterator[tuple[str, int, Path]]:
    """Trains what is not there yet: step, seed and stage of each ranker in turn."""
    for seed in recipe.seeds:
        done: dict[str, Path] = {}
        for name in [name for name in recipe.steps if seed in recipe.seeds_of(name)]:
            step = recipe.steps[name]
            job, inputs = _job(recipe, step, seed, tables)
            start = done[step.start] if step.start else None
            teachers = [done[teacher] for teacher in step.teachers]
            job = replace(job, teachers=_lessons(folder, step, teachers, tables, workers))
            stage = folder / "rankers" / f"{name}-seed{seed}"
            done[name] = trained(stage, job, workers, inputs, start, teachers)
            yield name, seed, stage


def _lessons(
    folder: Path,
    step: Step,
    teachers: Sequence[Path],
    tables: Mapping[str, Path],
    workers: Workers,
) -> tuple[tuple[str, ...], ...]:
    """For each teacher its stored logits of each training table, taken once."""
    return tuple(
        tuple(
            str(
                taught(folder / "logits" / f"{name}-{teacher.name}", tables[name], teacher, workers)
            )
            for name in step.train
        )
        for teacher in teachers
    )


def prepare(recipe: Recipe, folder: Path, sources: Mapping[str, str]) -> dict[str, Path]:
    """Stages of the tables; those evaluated on first, so that training tables can avoid them."""
    held_out = {recipe.dev, *recipe.tests, *(s.dev for s in recipe.steps.values() if s.dev)}
    done: dict[str, Path] = {}
    for name in sorted(recipe.tables, key=lambda name: name not in held_out):
        data = recipe.tables[name]
        others = done if name not in held_out and recipe.leaks == "drop" else {}
        others = {n: path for n, path in others.items() if n in held_out}
        done[name] = prepared(folder / name, data, sources.get(data.corpus), others)
    if recipe.leaks == "error":
        for name in recipe.tables.keys() - held_out:
            for other in sorted(held_out):
                corpora.check_leaks({name: table(done[name]), other: table(done[other])})
    return done


def _job(
    recipe: Recipe, step: Step, seed: int, tables: Mapping[str, Path]
) -> tuple[Job, dict[str, Path]]:
    dev = tables[step.dev or recipe.dev]
    watched = {"dev": dev}
    if recipe.curves:
        watched |= {test: tables[test] for test in recipe.tests}
    model = replace(recipe.model, layers=step.layers, exits=step.exits, heads=step.heads)
    job = Job(
        model=replace(model, path=step.model or model.path),
        objective=step.objective,
        train=tuple(str(tables[name]) for name in step.train),
        watched={name: str(path) for name, path in watched.items()},
        training=replace(step.training, seed=step.training.seed + seed),
        tracking=recipe.tracking,
    )
    return job, {**{name: tables[name] for name in step.train}, "dev": dev}


def tell(recipe: Recipe, folder: Path, found: Found) -> None:
    """Writes a report of each test, and draws it."""
    for test, systems in found.items():
        made = report(
            f"{recipe.title}: {test}",
            systems,
            baseline=str(recipe.against(test)),
            published=recipe.published.get(test),
        )
        save(made, folder / f"{test}.md")
        log.info("\n%s", markdown(made))
        spreads = {row.system: row.measures for row in made.rows}
        plots.bars(spreads, made.title, "mean over questions", folder / f"{test}.png")
        if recipe.curves:
            _curve(recipe, folder, test)


def _curve(recipe: Recipe, folder: Path, test: str) -> None:
    """MAP over epochs, and how much it moves between epochs (TANDA, Figure 4)."""
    series: dict[str, list[tuple[float, float]]] = {}
    moves: dict[str, list[float]] = {}
    for name in recipe.steps:
        for seed in recipe.seeds_of(name):
            lines = read(folder / "rankers" / f"{name}-seed{seed}" / "metrics.jsonl")
            points = [(x["epoch"], x[f"{test}/AP"]) for x in lines if f"{test}/AP" in x]
            series.setdefault(name, []).extend(points)
            steps = np.abs(np.diff([y for _, y in points]))
            moves.setdefault(name, []).extend(steps.tolist())
    plots.learning_curve(
        series, f"{recipe.title}: {test}", "epoch", "MAP", folder / f"{test}-curve.png"
    )
    for name, sizes in moves.items():
        if sizes:
            log.info("%s, %s: MAP moves by %.4f between epochs", test, name, float(np.mean(sizes)))


def main() -> None:
    """The command line."""
    recipe, output, workers, sources = read_recipe(Recipe)
    if workers.count == 0:
        run(recipe, output, workers, sources)
        return
    with connected():
        run(recipe, output, workers, sources)


if __name__ == "__main__":
    main()
