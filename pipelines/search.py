"""Searches the distillation settings of one student with Ray Tune; writes the best as a recipe.

    python -m pipelines.search --config RECIPE --student RUN --output DIR

The recipe is one of `pipelines.distill`. The rankers that the student builds on are trained once.
Each trial trains the student; bad trials are stopped early. `DIR/best.yaml` is the recipe with the
best settings, for `pipelines.distill`. An interrupted search continues.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.distributed.tune import search_training
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.stage import manifest, plain, stage
from as2ray.losses.distillation import DistillationLoss
from pipelines import distill
from pipelines.experiment import check_runs, plan_run, prepare, train_runs
from pipelines.recipe import RunSpec, command
from tune_spaces import distillation

log = logging.getLogger(__name__)

SEARCH_KEYS = ("student", "num_trials", "grace_period")
"""Keys that a recipe of `pipelines.distill` does not have."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(distill.Recipe):
    """A recipe of `pipelines.distill`, and the search of one student's settings."""

    student: str = ""
    """The run whose settings are searched."""
    num_trials: PositiveInt = 20
    """Number of trials."""
    grace_period: PositiveInt = 2
    """Evaluations before a trial may be stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        students = [n for n, run in self.runs.items() if isinstance(run.loss, DistillationLoss)]
        if self.student not in students:
            raise ConfigError(
                f"student {self.student!r} is not one of the runs with a distillation loss: "
                f"{students}",
                fix="name one with --student",
            )


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> Path:
    """Searches, and writes the recipe with the best settings.

    Args:
        recipe: The student and its recipe.
        output: Folder of the stages.
        workers: Part of the cluster that each trial uses.
        data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.

    Returns:
        Path of the written recipe.
    """
    folder = Path(output).resolve()
    seed = recipe.seeds_of(recipe.student)[0]
    check_runs(recipe, folder)
    tables = prepare(recipe, folder / "tables", data_dirs or {})
    made = train_runs(_before(recipe, seed), folder, workers, tables)
    done = {name: ranker for name, _, ranker in made}
    step = recipe.runs[recipe.student]
    plan = plan_run(recipe, step, seed, folder, workers, tables, done)

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

    inputs = {
        **plan.inputs(),
        "num_trials": recipe.num_trials,
        "grace_period": recipe.grace_period,
    }
    found = manifest(stage(folder / "search", inputs, make))["outputs"]
    config = found["choice"]
    log.info("%s: dev MAP %.4f with %s", recipe.student, found["dev MAP"], config)
    return _write(recipe, distillation.apply_params(config, step), folder / "best.yaml")


def _before(recipe: Recipe, seed: int) -> distill.Recipe:
    """Returns the recipe of the runs that the student builds on, with one seed."""
    needed = _needed(recipe, recipe.student)
    steps = {name: replace(recipe.runs[name], seeds=None) for name in needed}
    values = {name: value for name, value in vars(recipe).items() if name not in SEARCH_KEYS}
    values |= {"runs": steps, "seeds": [seed], "baseline": needed[0]}
    return distill.Recipe(**{**values, "ensembles": {}, "teacher_agreement": []})


def _needed(recipe: Recipe, name: str) -> list[str]:
    """Returns the runs that a run builds on, in order."""
    step = recipe.runs[name]
    direct = [*([step.init_from] if step.init_from else []), *step.teachers]
    found = {other for one in direct for other in [*_needed(recipe, one), one]}
    return [other for other in recipe.runs if other in found]


def _write(recipe: Recipe, best: RunSpec, path: Path) -> Path:
    values = {k: v for k, v in asdict(recipe).items() if k not in SEARCH_KEYS}
    values["runs"][recipe.student] = asdict(best)
    path.write_text(yaml.safe_dump(plain(values), sort_keys=False, width=120), encoding="utf-8")
    return path


def main() -> None:
    """Runs the command line."""
    command(Recipe, run, searches=True)


if __name__ == "__main__":
    main()
