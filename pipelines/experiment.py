"""What pipelines share: check a recipe, prepare its tables, train its runs, write its reports."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from as2ray.checkpoints import packaged
from as2ray.checkpoints.initialization import RankerShape, check_model_spec, encoder_num_layers
from as2ray.corpora.leaks import check_leaks
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation import plots
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.stage import MANIFEST
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.training.job import TrainingJob
from as2ray.training.tracking import read_metrics
from pipelines.recipe import Recipe, RunSpec
from pipelines.steps import Plan, prepare_table, store_teacher_logits, table, train_ranker

log = logging.getLogger(__name__)

Found = dict[str, dict[str, dict[int, EvaluationResult]]]
"""Evaluation results by test, system and seed."""


def train_runs(
    recipe: Recipe,
    folder: Path,
    workers: WorkersConfig,
    tables: Mapping[str, Path],
    passages: Mapping[str, Path] | None = None,
) -> Iterator[tuple[str, int, Path]]:
    """Trains the rankers that do not exist yet; yields run, seed and stage of each ranker.

    Args:
        recipe: Its runs are trained, all of them with one seed before the next seed.
        folder: Folder of the pipeline's stages.
        workers: Part of the cluster to use.
        tables: Stages of the recipe's tables.
        passages: Stages of tables by passages, for runs that train joint models.

    Raises:
        ConfigError: See `check_runs`.
        CheckpointError: A model to start from is neither an encoder nor a ranker.
    """
    check_runs(recipe, folder, passages is not None)
    for seed in recipe.seeds:
        rankers: dict[str, Path] = {}
        for name in [name for name in recipe.runs if seed in recipe.seeds_of(name)]:
            run = recipe.runs[name]
            run_tables = (passages or {}) if isinstance(run.loss, TwoInOneLoss) else tables
            plan = plan_run(recipe, run, seed, folder, workers, run_tables, rankers)
            rankers[name] = train_ranker(_stage(folder, name, seed), plan, workers)
            yield name, seed, rankers[name]


def check_runs(recipe: Recipe, folder: Path, passages: bool = False) -> dict[str, RankerShape]:
    """Checks before training that every run can start from its model or earlier run.

    Args:
        recipe: Its runs are checked.
        folder: Folder of the pipeline's stages. The model of a finished run is not needed.
        passages: Whether joint models can be trained.

    Returns:
        Shape of each run's ranker.

    Raises:
        ConfigError: Layers, exits or heads of a run do not go with what it starts from, it trains a
            joint model without tables by passages, or a joint model is one of its teachers.
        CheckpointError: A model to start from is neither an encoder nor a ranker.
    """
    layers_by_path: dict[str, int] = {}
    shapes: dict[str, RankerShape] = {}
    for name, run in recipe.runs.items():
        is_joint = isinstance(run.loss, TwoInOneLoss)
        extract_answers = isinstance(run.loss, TwoInOneLoss) and run.loss.answer_loss
        stages = [_stage(folder, name, seed) for seed in recipe.seeds_of(name)]
        start_shape = shapes[run.init_from] if run.init_from else None
        if start_shape is not None:
            encoder_layers = start_shape.num_layers
        elif all((stage / MANIFEST).is_file() for stage in stages):
            encoder_layers = encoder_num_layers(stages[0] / "ranker")
            heads = (run.exit_layers or (), run.num_ranking_heads)
            shapes[name] = RankerShape(encoder_layers, *heads, is_joint, extract_answers)
            continue
        else:
            path = run.model or recipe.model.path
            if path not in layers_by_path:
                layers_by_path[path] = encoder_num_layers(packaged.resolve_model_path(path))
            encoder_layers = layers_by_path[path]
        try:
            shapes[name] = check_model_spec(
                run, encoder_layers, start_shape, is_joint=is_joint, extract_answers=extract_answers
            )
        except ConfigError as error:
            raise ConfigError(f"run {name!r}: {error.problem}", error.fix) from None
        if is_joint and not passages:
            raise ConfigError(
                f"run {name!r} trains a joint model, which only `pipelines.two_in_one` does"
            )
        if joint_teachers := [teacher for teacher in run.teachers if shapes[teacher].is_joint]:
            raise ConfigError(
                f"run {name!r} has the joint models {joint_teachers} as teachers; teachers must "
                "rank candidates one by one"
            )
    return shapes


def _stage(folder: Path, name: str, seed: int) -> Path:
    return folder / "rankers" / f"{name}-seed{seed}"


def plan_run(
    recipe: Recipe,
    run: RunSpec,
    seed: int,
    folder: Path,
    workers: WorkersConfig,
    tables: Mapping[str, Path],
    rankers: Mapping[str, Path],
) -> Plan:
    """Stores the logits of a run's teachers, and returns the plan of its training.

    Args:
        recipe: Recipe of the run.
        run: The run.
        seed: One of the recipe's seeds.
        folder: Folder of the pipeline's stages.
        workers: Part of the cluster to use.
        tables: Stages of the recipe's tables.
        rankers: Stages of the rankers that the run builds on, by the names of their runs.
    """
    teachers = [rankers[teacher] for teacher in run.teachers]
    teacher_logits = _store_teacher_logits(folder, run, teachers, tables, workers)
    job, inputs = _job(recipe, run, seed, tables)
    start = rankers[run.init_from] if run.init_from else None
    return Plan(replace(job, teacher_logits=teacher_logits), inputs, start, tuple(teachers))


def _store_teacher_logits(
    folder: Path,
    run: RunSpec,
    teachers: Sequence[Path],
    tables: Mapping[str, Path],
    workers: WorkersConfig,
) -> tuple[tuple[str, ...], ...]:
    """Returns for each teacher the folders of its logits, one for each training table."""
    return tuple(
        tuple(
            str(
                store_teacher_logits(
                    folder / "logits" / f"{name}-{teacher.name}", tables[name], teacher, workers
                )
            )
            for name in run.train
        )
        for teacher in teachers
    )


def prepare(recipe: Recipe, folder: Path, data_dirs: Mapping[str, str]) -> dict[str, Path]:
    """Prepares the recipe's tables, held-out ones first, so that training tables can avoid them.

    Args:
        recipe: Its tables are prepared.
        folder: Folder of their stages.
        data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.

    Raises:
        LeakError: A training table has questions of a held-out one, and `on_leak` is `error`.
    """
    held_out = recipe.held_out()
    stages: dict[str, Path] = {}
    for name in sorted(recipe.tables, key=lambda name: name not in held_out):
        spec = recipe.tables[name]
        others = stages if name not in held_out and recipe.on_leak == "drop" else {}
        others = {n: path for n, path in others.items() if n in held_out}
        stages[name] = prepare_table(folder / name, spec, data_dirs.get(spec.corpus), others)
    if recipe.on_leak == "error":
        for name in sorted({t for run in recipe.runs.values() for t in run.train} - held_out):
            for other in sorted(held_out):
                check_leaks({name: table(stages[name]), other: table(stages[other])})
    return stages


def _job(
    recipe: Recipe, run: RunSpec, seed: int, tables: Mapping[str, Path]
) -> tuple[TrainingJob, dict[str, Path]]:
    """Returns the training job of a run, and the stages of the tables that change its result."""
    dev = tables[run.dev or recipe.dev]
    eval_tables = {"dev": dev}
    if recipe.plot_learning_curves:
        eval_tables |= {test: tables[test] for test in recipe.tests}
    model = replace(
        recipe.model,
        path=run.model or recipe.model.path,
        num_layers=run.num_layers,
        exit_layers=run.exit_layers,
        num_ranking_heads=run.num_ranking_heads,
    )
    job = TrainingJob(
        model=model,
        loss=run.loss,
        train_tables=tuple(str(tables[name]) for name in run.train),
        eval_tables={name: str(path) for name, path in eval_tables.items()},
        training=replace(run.training, seed=run.training.seed + seed),
        tracking=recipe.tracking,
    )
    return job, {**{name: tables[name] for name in run.train}, "dev": dev}


def write_reports(recipe: Recipe, folder: Path, results: Found) -> None:
    """Writes a report and a bar chart of each test."""
    for test, systems in results.items():
        report = build_report(
            f"{recipe.title}: {test}",
            systems,
            baseline=str(recipe.against(test)),
            published_results=recipe.published_results.get(test),
        )
        save_report(report, folder / f"{test}.md")
        log.info("\n%s", to_markdown(report))
        measures = {row.system: row.measures for row in report.rows}
        plots.bar_chart(measures, report.title, "mean over questions", folder / f"{test}.png")
        if recipe.plot_learning_curves:
            _plot_learning_curve(recipe, folder, test)


def _plot_learning_curve(recipe: Recipe, folder: Path, test: str) -> None:
    """Plots MAP over epochs, and logs its mean change between epochs (TANDA, Figure 4)."""
    series: dict[str, list[tuple[float, float]]] = {}
    changes: dict[str, list[float]] = {}
    for name in recipe.runs:
        for seed in recipe.seeds_of(name):
            lines = read_metrics(folder / "rankers" / f"{name}-seed{seed}" / "metrics.jsonl")
            points = [(x["epoch"], x[f"{test}/AP"]) for x in lines if f"{test}/AP" in x]
            series.setdefault(name, []).extend(points)
            run_changes = np.abs(np.diff([y for _, y in points]))
            changes.setdefault(name, []).extend(run_changes.tolist())
    if not any(series.values()):
        log.warning("no learning curve of %s: the rankers were trained without it", test)
        return
    plots.learning_curve(
        series, f"{recipe.title}: {test}", "epoch", "MAP", folder / f"{test}-curve.png"
    )
    for name, sizes in changes.items():
        if sizes:
            mean_change = float(np.mean(sizes))
            log.info("%s, %s: MAP changes by %.4f between epochs", test, name, mean_change)
