"""What all pipelines do with a recipe: prepare its tables, train its steps, tell its results.

Knows recipes and the stages they share. Must not know any one pipeline.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from as2ray.checkpoints import packaged
from as2ray.checkpoints.initialization import encoder_num_layers
from as2ray.corpora.leaks import check_leaks
from as2ray.distributed.plan import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation import plots
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.stage import MANIFEST
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.models.multi_stage import check_exit_layers
from as2ray.training.job import TrainingJob
from as2ray.training.tracking import read_metrics
from pipelines.recipe import Recipe, Step
from pipelines.steps import Plan, prepare_table, store_teacher_logits, table, train_ranker

log = logging.getLogger(__name__)

Found = dict[str, dict[str, dict[int, EvaluationResult]]]
"""Evaluations by test, system and seed."""


def train_runs(
    recipe: Recipe,
    folder: Path,
    workers: WorkersConfig,
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
        RecipeError: See `outlines`.
        CheckpointError: A model to start from is none.
    """
    check_runs(recipe, folder, passages is not None)
    for seed in recipe.seeds:
        done: dict[str, Path] = {}
        for name in [name for name in recipe.runs if seed in recipe.seeds_of(name)]:
            step = recipe.runs[name]
            read = (passages or {}) if isinstance(step.loss, TwoInOneLoss) else tables
            plan = planned(recipe, step, seed, folder, workers, read, done)
            done[name] = train_ranker(_stage(folder, name, seed), plan, workers)
            yield name, seed, done[name]


@dataclass(frozen=True)
class RankerShape:
    """What is known of a step's ranker before it is trained."""

    depth: int
    """Layers of its encoder, up to the last exit."""
    exits: tuple[int, ...] = ()
    heads: int = 0
    joint: bool = False
    answers: bool = False

    def __str__(self) -> str:
        parts = [f"exits {list(self.exits)}" * bool(self.exits), f"{self.heads} heads"]
        kind = "a joint model" if self.joint else "an encoder"
        return f"{kind} of {self.depth} layers, {', '.join(filter(None, parts))}"


def check_runs(recipe: Recipe, folder: Path, passages: bool = False) -> dict[str, RankerShape]:
    """The ranker of each step, and what would end a later step when those before it are trained.

    Args:
        recipe: Its steps.
        folder: Of the pipeline's stages: what is finished needs its model no more.
        passages: Whether joint models can be trained.

    Raises:
        RecipeError: A step asks for layers, exits or heads that do not go with what it starts
            from, or for a joint model where there are no passages.
        CheckpointError: A model to start from is none.
    """
    depths: dict[str, int] = {}
    held: dict[str, RankerShape] = {}
    for name, step in recipe.runs.items():
        joint = isinstance(step.loss, TwoInOneLoss)
        answers = isinstance(step.loss, TwoInOneLoss) and step.loss.answer_loss
        done = [_stage(folder, name, seed) for seed in recipe.seeds_of(name)]
        if step.init_from:
            before = held[step.init_from]
        elif all((stage / MANIFEST).is_file() for stage in done):
            depth = encoder_num_layers(done[0] / "ranker")
            held[name] = RankerShape(
                depth, step.exit_layers or (), step.num_ranking_heads, joint, answers
            )
            continue
        else:
            path = step.model or recipe.model.path
            if path not in depths:
                depths[path] = encoder_num_layers(packaged.resolve_model_path(path))
            before = RankerShape(depths[path])
        if before.exits or before.joint:
            fine = step.num_layers is None and (
                step.exit_layers is None or step.exit_layers == before.exits
            )
            fine = (
                fine and step.num_ranking_heads in (0, before.heads) and answers <= before.answers
            )
            fine = fine and joint == before.joint
            made = before
        else:
            layers = before.depth if step.num_layers is None else step.num_layers
            fine = 1 <= layers <= before.depth
            if fine and step.exit_layers is not None:
                check_exit_layers(step.exit_layers, layers)
            last = step.exit_layers[-1] if step.exit_layers else layers
            # A checkpoint with heads of its own ends at its last exit.
            fine = (
                fine
                and step.num_ranking_heads >= 0
                and (not (step.num_ranking_heads and step.init_from) or last < layers)
            )
            made = RankerShape(last, step.exit_layers or (), step.num_ranking_heads, joint, answers)
        taught = [teacher for teacher in step.teachers if held[teacher].joint]
        if not fine or (joint and not passages) or taught:
            raise ConfigError(
                (
                    f"step {name!r} with layers {step.num_layers}, exits {step.exit_layers}, {step.num_ranking_heads} heads, "
                    f"objective {step.loss!r}, starting from {before}"
                    + (f", taught by the joint models {taught}" if taught else "")
                )
                + "; expected layers and exits that its encoder has, heads on layers above the last "
                "exit; a cascade or joint model goes on as it is; joint models in "
                "`pipelines.two_in_one` alone, and never as teachers",
            )
        held[name] = made
    return held


def _stage(folder: Path, name: str, seed: int) -> Path:
    return folder / "rankers" / f"{name}-seed{seed}"


def planned(
    recipe: Recipe,
    step: Step,
    seed: int,
    folder: Path,
    workers: WorkersConfig,
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
    start = done[step.init_from] if step.init_from else None
    return Plan(replace(job, teachers=lessons), inputs, start, tuple(teachers))


def _lessons(
    folder: Path,
    step: Step,
    teachers: Sequence[Path],
    tables: Mapping[str, Path],
    workers: WorkersConfig,
) -> tuple[tuple[str, ...], ...]:
    """For each teacher its stored logits of each training table, taken once."""
    return tuple(
        tuple(
            str(
                store_teacher_logits(
                    folder / "logits" / f"{name}-{teacher.name}", tables[name], teacher, workers
                )
            )
            for name in step.train
        )
        for teacher in teachers
    )


def prepare(recipe: Recipe, folder: Path, data_dirs: Mapping[str, str]) -> dict[str, Path]:
    """Stages of the tables; those evaluated on first, so that training tables can avoid them."""
    held_out = recipe.held_out()
    done: dict[str, Path] = {}
    for name in sorted(recipe.tables, key=lambda name: name not in held_out):
        data = recipe.tables[name]
        others = done if name not in held_out and recipe.on_leak == "drop" else {}
        others = {n: path for n, path in others.items() if n in held_out}
        done[name] = prepare_table(folder / name, data, data_dirs.get(data.corpus), others)
    if recipe.on_leak == "error":
        for name in sorted({t for step in recipe.runs.values() for t in step.train} - held_out):
            for other in sorted(held_out):
                check_leaks({name: table(done[name]), other: table(done[other])})
    return done


def _job(
    recipe: Recipe, step: Step, seed: int, tables: Mapping[str, Path]
) -> tuple[TrainingJob, dict[str, Path]]:
    dev = tables[step.dev or recipe.dev]
    watched = {"dev": dev}
    if recipe.plot_learning_curves:
        watched |= {test: tables[test] for test in recipe.tests}
    model = replace(
        recipe.model, layers=step.num_layers, exits=step.exit_layers, heads=step.num_ranking_heads
    )
    job = TrainingJob(
        model=replace(model, path=step.model or model.path),
        loss=step.loss,
        train_tables=tuple(str(tables[name]) for name in step.train),
        eval_tables={name: str(path) for name, path in watched.items()},
        training=replace(step.training, seed=step.training.seed + seed),
        tracking=recipe.tracking,
    )
    return job, {**{name: tables[name] for name in step.train}, "dev": dev}


def write_reports(recipe: Recipe, folder: Path, found: Found) -> None:
    """Writes a report of each test, and draws it."""
    for test, systems in found.items():
        made = build_report(
            f"{recipe.title}: {test}",
            systems,
            baseline=str(recipe.against(test)),
            published_results=recipe.published_results.get(test),
        )
        save_report(made, folder / f"{test}.md")
        log.info("\n%s", to_markdown(made))
        spreads = {row.system: row.measures for row in made.rows}
        plots.bar_chart(spreads, made.title, "mean over questions", folder / f"{test}.png")
        if recipe.plot_learning_curves:
            _curve(recipe, folder, test)


def _curve(recipe: Recipe, folder: Path, test: str) -> None:
    """MAP over epochs, and how much it moves between epochs (TANDA, Figure 4)."""
    series: dict[str, list[tuple[float, float]]] = {}
    moves: dict[str, list[float]] = {}
    for name in recipe.runs:
        for seed in recipe.seeds_of(name):
            lines = read_metrics(folder / "rankers" / f"{name}-seed{seed}" / "metrics.jsonl")
            points = [(x["epoch"], x[f"{test}/AP"]) for x in lines if f"{test}/AP" in x]
            series.setdefault(name, []).extend(points)
            steps = np.abs(np.diff([y for _, y in points]))
            moves.setdefault(name, []).extend(steps.tolist())
    if not any(series.values()):
        log.warning("no curve of %s: it was not followed when the rankers were trained", test)
        return
    plots.learning_curve(
        series, f"{recipe.title}: {test}", "epoch", "MAP", folder / f"{test}-curve.png"
    )
    for name, sizes in moves.items():
        if sizes:
            log.info("%s, %s: MAP moves by %.4f between epochs", test, name, float(np.mean(sizes)))
