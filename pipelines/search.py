"""A search of distillation's settings for one student, under Ray Tune, and the best as a recipe.

    python -m pipelines.search --config RECIPE --student STEP --output DIR

The recipe is one of `pipelines.distill`. What the student builds on is trained and scored once;
each trial trains the student, and bad ones are stopped early. `DIR/best.yaml` is the recipe with
the best settings in place, for `pipelines.distill`. Interrupted, it goes on.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from as2ray.distributed.plan import WorkersConfig
from as2ray.distributed.tune import search_training
from as2ray.errors import ConfigError
from as2ray.experiments.stage import manifest, plain, stage
from as2ray.losses.distillation import DistillationLoss
from pipelines import distill
from pipelines.experiment import check_runs, planned, prepare, train_runs
from pipelines.recipe import Step, command
from tune_spaces import distillation

log = logging.getLogger(__name__)

OURS = ("student", "searched", "grace")


@dataclass(frozen=True)
class Recipe(distill.Recipe):
    """A recipe of `pipelines.distill`, and what to search in it."""

    student: str = ""
    """The step whose settings are searched."""
    num_trials: int = 20
    """Trials."""
    grace_period: int = 2
    """Validations before a trial may be stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        students = [n for n, s in self.runs.items() if isinstance(s.loss, DistillationLoss)]
        if self.num_trials < 1 or self.grace_period < 1:
            raise ConfigError(
                f"{self.num_trials} trials, {self.grace_period} validations of grace"
                "; expected at least 1 of each",
            )
        if self.student not in students:
            raise ConfigError(
                f"student {self.student!r}"
                f"; expected a step that distils from teachers: one of {students}",
                fix="name one with --student",
            )


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> Path:
    """Searches, and writes the recipe of the best choice; its path.

    Args:
        recipe: What to search.
        output: Folder of the stages.
        workers: What to take of the cluster, each trial.
        sources: For each corpus its folder; by default its place in AS2RAY_DATA.
    """
    folder = Path(output).resolve()
    seed = recipe.seeds_of(recipe.student)[0]
    check_runs(recipe, folder)
    tables = prepare(recipe, folder / "tables", data_dirs or {})
    made = train_runs(_before(recipe, seed), folder, workers, tables)
    done = {name: ranker for name, _, ranker in made}
    step = recipe.runs[recipe.student]
    plan = planned(recipe, step, seed, folder, workers, tables, done)

    def make(part: Path) -> dict[str, Any]:
        config, quality = search_training(
            partial(distillation.apply_params, student=plan.resolved()),
            distillation.suggest,
            part.resolve() / "tune",
            workers,
            recipe.num_trials,
            recipe.grace_period,
        )
        return {"choice": config, "dev MAP": quality}

    identity = {**plan.identity(), "trials": recipe.num_trials, "grace": recipe.grace_period}
    found = manifest(stage(folder / "search", identity, make))["found"]
    config = found["choice"]
    log.info("%s: dev MAP %.4f with %s", recipe.student, found["dev MAP"], config)
    return _write(recipe, distillation.apply_params(config, step), folder / "best.yaml")


def _before(recipe: Recipe, seed: int) -> distill.Recipe:
    """The recipe of what the student builds on, with one seed."""
    needed = _needed(recipe, recipe.student)
    steps = {name: replace(recipe.runs[name], seeds=None) for name in needed}
    values = {name: value for name, value in vars(recipe).items() if name not in OURS}
    values |= {"steps": steps, "seeds": [seed], "baseline": needed[0]}
    return distill.Recipe(**{**values, "ensembles": {}, "resemblance": []})


def _needed(recipe: Recipe, name: str) -> list[str]:
    """Steps that a step builds on, in order."""
    step = recipe.runs[name]
    direct = [*([step.init_from] if step.init_from else []), *step.teachers]
    found = {other for one in direct for other in [*_needed(recipe, one), one]}
    return [other for other in recipe.runs if other in found]


def _write(recipe: Recipe, best: Step, path: Path) -> Path:
    values = {k: v for k, v in asdict(recipe).items() if k not in OURS}
    values["steps"][recipe.student] = asdict(best)
    path.write_text(yaml.safe_dump(plain(values), sort_keys=False, width=120), encoding="utf-8")
    return path


def main() -> None:
    """The command line."""
    command(Recipe, run, searches=True)


if __name__ == "__main__":
    main()
