"""What all pipelines do with a recipe: prepare its tables, train its steps, tell its results.

Knows recipes and the stages they share. Must not know any one pipeline.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from as2ray import checkpoint, corpora, packaged
from as2ray.distributed.plan import Workers
from as2ray.errors import RecipeError
from as2ray.evaluation import plots
from as2ray.evaluation.measures import Evaluation
from as2ray.evaluation.report import markdown, report, save
from as2ray.models.staged import check_exits
from as2ray.objectives import TwoInOne
from as2ray.training.job import Job
from as2ray.training.tracking import read
from pipelines.recipe import Recipe, Step
from pipelines.steps import Plan, prepared, table, taught, trained

log = logging.getLogger(__name__)

Found = dict[str, dict[str, dict[int, Evaluation]]]
"""Evaluations by test, system and seed."""


def rankers(
    recipe: Recipe,
    folder: Path,
    workers: Workers,
    tables: Mapping[str, Path],
    passages: Mapping[str, Path] | None = None,
) -> Iterator[tuple[str, int, Path]]:
    """Trains what is not there yet: step, seed and stage of each ranker in turn.

    Args:
        recipe: Its steps.
        folder: Of the pipeline's stages.
        workers: What to take of the cluster.
        tables: Stages of the recipe's tables.
        passages: The same by passages, for steps that train joint models.

    Raises:
        RecipeError: A step asks for layers or exits that its encoder does not have, or for a joint
            model where there are no passages.
        CheckpointError: A model to start from is none.
    """
    _refuse_unfit(recipe, passages is not None)
    for seed in recipe.seeds:
        done: dict[str, Path] = {}
        for name in [name for name in recipe.steps if seed in recipe.seeds_of(name)]:
            step = recipe.steps[name]
            read = (passages or {}) if isinstance(step.objective, TwoInOne) else tables
            plan = planned(recipe, step, seed, folder, workers, read, done)
            stage = folder / "rankers" / f"{name}-seed{seed}"
            done[name] = trained(stage, plan, workers)
            yield name, seed, stage


def _refuse_unfit(recipe: Recipe, passages: bool) -> None:
    """All that would end a later step, when those before it are trained, looked at first."""
    paths = {s.model or recipe.model.path for s in recipe.steps.values() if not s.start}
    depths = {path: checkpoint.depth(packaged.resolve(path)) for path in sorted(paths)}
    held: dict[str, int] = {}
    for name, step in recipe.steps.items():
        depth = held[step.start] if step.start else depths[step.model or recipe.model.path]
        if isinstance(step.objective, TwoInOne) and not passages:
            raise RecipeError(
                f"step {name!r} with objective {step.objective}",
                expected="a joint model's objective in `pipelines.two_in_one` alone",
                mend="run that pipeline, or name another objective",
            )
        if not 1 <= (layers := step.layers or depth) <= depth:
            raise RecipeError(
                f"step {name!r} with {layers} layers of an encoder that has {depth}",
                expected=f"1 to {depth} layers",
                mend="lower `layers`",
            )
        if step.exits:
            check_exits(step.exits, layers)
        held[name] = layers


def planned(
    recipe: Recipe,
    step: Step,
    seed: int,
    folder: Path,
    workers: Workers,
    tables: Mapping[str, Path],
    done: Mapping[str, Path],
) -> Plan:
    """What a step trains, once its teachers' logits are stored.

    Args:
        recipe: The step's.
        step: The step.
        seed: One of the recipe's.
        folder: Of the pipeline's stages.
        workers: What to take of the cluster.
        tables: Stages of the recipe's tables.
        done: Stages of the rankers that the step builds on, by their steps' names.
    """
    teachers = [done[teacher] for teacher in step.teachers]
    lessons = _lessons(folder, step, teachers, tables, workers)
    job, inputs = _job(recipe, step, seed, tables)
    start = done[step.start] if step.start else None
    return Plan(replace(job, teachers=lessons), inputs, start, tuple(teachers))


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
