"""CERBERUS: teachers, their stored logits, students with one head or several, and ensembles.

    python -m pipelines.distill --config pipelines/recipes/cerberus_table2.yaml --output DIR

Training is that of any recipe: a teacher is a step, a student a step with `teachers`. Here stand
ensembles, whose weights are searched on the dev table, students whose body has exits and whose drop
ratios are searched there too, how students resemble their teachers, and how long each takes.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.plan import WorkersConfig
from as2ray.distributed.tune import run_search
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
from pipelines.recipe import Recipe as Steps
from pipelines.recipe import check_names, command
from pipelines.steps import evaluate_ranker, table
from pipelines.trials import ensemble_map, weighted
from tune_spaces import ensembles

log = logging.getLogger(__name__)

TIMED = 2_048
"""Pairs of the first test that the clock is asked about."""


@dataclass(frozen=True)
class Recipe(Steps):
    """Teachers, students and ensembles."""

    ensembles: dict[str, list[str]] = field(default_factory=dict)
    """Ensembles by name: the steps that they are made of."""
    num_ensemble_trials: int = 100
    """Of Optuna's search for each ensemble's weights, on the recipe's dev table."""
    search: Search = field(default_factory=Search)
    """How drop ratios are searched for students with several exits."""
    teacher_agreement: list[str] = field(default_factory=list)
    """Students with a head for each teacher, whose heads are compared with them (Figure 3)."""
    measure_speed: bool = True
    """Whether the clock is asked too, with the first seed's rankers (Table 5)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("ensemble", self.ensembles)
        if self.num_ensemble_trials < 0:
            raise ConfigError(
                f"{self.num_ensemble_trials} trials; expected 0 or more",
            )
        for name, members in self.ensembles.items():
            if name in self.runs or not members or not set(members) <= self.runs.keys():
                raise ConfigError(
                    f"ensemble {name!r} of {members}"
                    "; expected a name of its own, and steps of the recipe",
                    fix="describe them under `steps`",
                )
            self.seeds_shared(name, members)
        for name in self.teacher_agreement:
            step = self.runs.get(name)
            if (
                step is None
                or step.num_ranking_heads != len(step.teachers)
                or not step.num_ranking_heads
            ):
                raise ConfigError(
                    f"resemblance of {name!r}; expected a step with as many heads as teachers",
                    fix="name such a step",
                )

    def systems(self) -> list[str]:
        """Steps, ensembles, and with searched drop ratios the students that have several exits."""
        return [*self.runs, *self.ensembles, *(f"{s}-searched" for s in self.searches())]

    def searches(self) -> list[str]:
        """Steps whose rankers' drop ratios are searched."""
        return [name for name in self.runs if len(self.exits_of(name)) > 1]


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Runs what is not there yet, and writes the reports.

    Args:
        recipe: What to do.
        output: Folder of the stages.
        workers: What to take of the cluster.
        sources: For each corpus its folder; by default its place in AS2RAY_DATA.
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
            _tell_resemblance(recipe, folder, name, test, table(tables[test]))
    if recipe.measure_speed:
        _tell_latency(recipe, folder, done, table(tables[recipe.tests[0]])[:TIMED])


def _ensemble(folder: Path, members: Sequence[Path], dev: Path, num_trials: int) -> Path:
    """A stage with an ensemble of the weights that were best on a dev table."""
    identity = {"members": [digest(m) for m in members], "dev": digest(dev), "trials": num_trials}

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

    return stage(folder, identity, make)


def _tell_resemblance(recipe: Recipe, folder: Path, name: str, test: str, rows: pa.Table) -> None:
    """How often heads and teachers agree, and where the student follows most of them."""
    seed, teachers = recipe.seeds_of(name)[0], recipe.runs[name].teachers
    student = load(folder / "rankers" / f"{name}-seed{seed}" / "ranker")
    assert isinstance(student, CascadeRanker)
    texts = (rows["question"].to_pylist(), rows["candidate"].to_pylist())
    heads = {
        f"head {number}": scores
        for number, scores in enumerate(student.predict_heads(*texts).T.astype(float))
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
        for what in ("unanimous", "followed", "overruled"):
            right, questions = getattr(found, what)
            lines += ["", f"{what}: the student is right on {right} of {questions} questions"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _tell_latency(
    recipe: Recipe, folder: Path, done: Mapping[tuple[str, int], Path], rows: pa.Table
) -> None:
    """Parameters and time of each system, the baseline's first (Table 5)."""
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
    """The command line."""
    command(Recipe, run, searches=True)


if __name__ == "__main__":
    main()
