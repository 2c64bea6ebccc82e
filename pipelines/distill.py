"""CERBERUS: trains teachers and students with one or several heads, and ensembles of rankers.

    python -m pipelines.distill --config pipelines/recipes/cerberus_table2.yaml --output DIR

Runs are trained as in any recipe: a student is a run with `teachers`. This pipeline adds ensembles,
whose weights are searched on the dev table; a search for the drop ratios of students with several
exits; the agreement of students' heads with their teachers; and measured times.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.tune import run_search
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation import plots
from as2ray.evaluation.agreement import head_teacher_agreement, measure_majority_agreement
from as2ray.experiments.stage import digest, stage
from as2ray.models.cascade import CascadeRanker
from as2ray.models.ensemble import EnsembleRanker
from as2ray.profiling.latency import measure_latencies
from as2ray.tables.trec import align_run, read_run
from pipelines.drop_search import Search, replays, search_drop_ratios
from pipelines.experiment import Found, prepare, train_runs, write_reports
from pipelines.recipe import Recipe as BaseRecipe
from pipelines.recipe import check_names, command
from pipelines.steps import evaluate_ranker, table
from pipelines.trials import ensemble_map, weighted
from tune_spaces import ensembles

log = logging.getLogger(__name__)

TIMED_PAIRS = 2_048
"""Maximum number of pairs of the first test over which time is measured."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(BaseRecipe):
    """Teachers, students and ensembles."""

    ensembles: dict[str, list[str]] = field(default_factory=dict)
    """Ensembles by name: the runs of their members."""
    num_ensemble_trials: NonNegativeInt = 100
    """Trials of Optuna's search for each ensemble's weights, on the recipe's dev table."""
    search: Search = field(default_factory=Search)
    """Search for the drop ratios of students with several exits."""
    teacher_agreement: list[str] = field(default_factory=list)
    """Students with one head per teacher, whose heads are compared with them (Figure 3)."""
    measure_speed: bool = True
    """Whether to measure time too, with the rankers of the first seed (Table 5)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("ensemble", self.ensembles)
        for name, members in self.ensembles.items():
            if name in self.runs:
                raise ConfigError(f"{name!r} is the name of a run and of an ensemble")
            if not members or not set(members) <= self.runs.keys():
                raise ConfigError(
                    f"ensemble {name!r} of {members}: its members must be runs of the recipe"
                )
            self.seeds_shared(name, members)
        for name in self.teacher_agreement:
            run = self.runs.get(name)
            num_heads = 0 if run is None else run.num_ranking_heads
            if run is None or not num_heads or num_heads != len(run.teachers):
                raise ConfigError(
                    f"teacher_agreement of {name!r} needs a run with as many ranking heads as "
                    "teachers"
                )

    def systems(self) -> list[str]:
        """Returns runs, ensembles, and students with several exits after their search."""
        return [*self.runs, *self.ensembles, *(f"{run}-searched" for run in self.searches())]

    def searches(self) -> list[str]:
        """Returns the runs whose drop ratios are searched."""
        return [name for name in self.runs if len(self.exits_of(name)) > 1]


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Trains and evaluates what does not exist yet, and writes the reports.

    Args:
        recipe: Tables, runs and systems.
        output: Folder of the stages.
        workers: Part of the cluster to use.
        data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.
    """
    folder = Path(output).resolve()
    tables = prepare(recipe, folder / "tables", data_dirs or {})
    tests = {test: tables[test] for test in recipe.tests}
    found: Found = {test: {} for test in recipe.tests}
    done: dict[tuple[str, int], Path] = {}
    for name, seed, made in train_runs(recipe, folder, workers, tables):
        done[name, seed] = made
    for name, members in recipe.ensembles.items():
        for seed in recipe.seeds_shared(name, members):
            of_seed = [done[member, seed] for member in members]
            place = folder / "rankers" / f"{name}-seed{seed}"
            done[name, seed] = _ensemble(
                place, of_seed, tables[recipe.dev], recipe.num_ensemble_trials
            )
    for (name, seed), made in list(done.items()):
        if name in recipe.searches():
            dev = tables[recipe.runs[name].dev or recipe.dev]
            stored = replays(folder, made, {"dev": dev}, recipe.question_filter)["dev"]
            done[f"{name}-searched", seed], _ = search_drop_ratios(
                folder, made, stored, recipe.search
            )
    for (name, seed), made in done.items():
        runs = folder / "runs" / f"{name}-seed{seed}"
        for test, one in evaluate_ranker(
            runs, made, tests, recipe.measures, recipe.question_filter
        ).items():
            found[test].setdefault(name, {})[seed] = one
    write_reports(recipe, folder, found)
    for name in recipe.teacher_agreement:
        for test in tests:
            _write_agreement(recipe, folder, name, test, table(tables[test]))
    if recipe.measure_speed:
        _write_latency(recipe, folder, done, table(tables[recipe.tests[0]])[:TIMED_PAIRS])


def _ensemble(folder: Path, members: Sequence[Path], dev: Path, num_trials: int) -> Path:
    """Makes a stage with an ensemble, whose weights are the best of a search on a dev table."""
    inputs = {
        "members": [digest(m) for m in members],
        "dev": digest(dev),
        "num_trials": num_trials,
    }

    def make(part: Path) -> dict[str, Any]:
        loaded = [load(member / "ranker", device="cpu") for member in members]
        rows = table(dev)
        texts = (rows["question"].to_pylist(), rows["candidate"].to_pylist())
        scores = np.stack([member.predict_exits(*texts)[:, -1] for member in loaded], 1)
        stored = (scores, rows["question_id"].to_numpy(), rows["label"].to_numpy())
        with ray_session():
            tried = run_search(
                weighted,
                partial(ensembles.suggest, num_members=len(members)),
                {"quality": "max"},
                stored,
                part.resolve() / "optuna",
                num_trials,
            )
        weights = [ensembles.apply_params(config, len(members)) for config, _ in tried]
        weights.append((1.0 / len(members),) * len(members))
        best = max(weights, key=lambda w: ensemble_map(w, stored))
        save(EnsembleRanker(loaded, best), part / "ranker")
        equal = ensemble_map(weights[-1], stored)
        return {"weights": best, "dev MAP": ensemble_map(best, stored), "equal weights": equal}

    return stage(folder, inputs, make)


def _write_agreement(recipe: Recipe, folder: Path, name: str, test: str, rows: pa.Table) -> None:
    """Writes how often heads and teachers agree, and how often the student follows a majority."""
    seed, teachers = recipe.seeds_of(name)[0], recipe.runs[name].teachers
    student = load(folder / "rankers" / f"{name}-seed{seed}" / "ranker")
    assert isinstance(student, CascadeRanker)
    texts = (rows["question"].to_pylist(), rows["candidate"].to_pylist())
    heads = {
        f"head {number}": scores
        for number, scores in enumerate(
            student.predict_heads(student.tokenizer.encode(*texts)).T.astype(float)
        )
    }
    taught = {
        teacher: align_run(
            read_run(folder / "runs" / f"{teacher}-seed{seed}" / f"{test}.run"), rows
        )
        for teacher in teachers
    }
    same = head_teacher_agreement(rows, heads, taught)
    path = folder / f"{test}-{name}-agreement"
    plots.heatmap(same, list(heads), teachers, f"{name} on {test}", path.with_suffix(".png"))
    lines = [f"| | {' | '.join(teachers)} |", "|" + "---|" * (len(teachers) + 1)]
    lines += [
        f"| {head} | {' | '.join(f'{value:.3f}' for value in values)} |"
        for head, values in zip(heads, same)
    ]
    if len(teachers) % 2:
        own = student.predict_table(rows).sort_keys
        found = measure_majority_agreement(rows, own, taught)
        for what in ("all_right", "majority_right", "minority_right"):
            right, questions = getattr(found, what)
            lines += ["", f"{what}: the student is right on {right} of {questions} questions"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _write_latency(
    recipe: Recipe, folder: Path, done: Mapping[tuple[str, int], Path], rows: pa.Table
) -> None:
    """Writes parameters and time of each system, the baseline first (Table 5)."""
    made: dict[str, Path] = {}
    for (name, _), place in done.items():
        made.setdefault(name, place / "ranker")
    baseline = str(recipe.against(recipe.tests[0]))
    order = sorted(made, key=lambda name: name != baseline)
    found = measure_latencies({name: load(made[name]) for name in order}, rows)
    lines = ["| system | parameters | µs a pair | times the baseline's |", "|---|---|---|---|"]
    for name, of in found.items():
        average, deviation = of.latency_us
        told = f"| {name} | {of.num_parameters:,} | {average:,.1f} ± {deviation:,.1f} "
        lines.append(f"{told}| {of.slowdown or ''} |")
    (folder / "latency.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Runs the command line."""
    command(Recipe, run, searches=True)


if __name__ == "__main__":
    main()
