"""Searches the settings of one run, by a grid or with Ray Tune; writes the best as a recipe.

    python -m pipelines.search --config RECIPE --student RUN --output DIR
    ... --grid '{training.learning_rate: [1e-6, 1e-5], loss.alpha: [0, 0.5]}'
    ... --space '{training.learning_rate: {low: 1e-6, high: 1e-4, log: true}}'

The recipe is one of `pipelines.distill` or `pipelines.transfer_adapt`. The rankers that the run
builds on are trained once. With a grid every combination is trained, and `DIR/grid.md` has every
row. With a space Optuna chooses, and bad trials are stopped early; `DIR/search` shows the trials.
With neither, Optuna searches a distilled student in the space of the CERBERUS paper.
`DIR/best.yaml` is the recipe with the best settings, which finds the rankers in the store. An
interrupted search continues.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from itertools import product
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.errors import ConfigError
from as2ray.evaluation.report import markdown_table
from as2ray.experiments.command import Pipeline
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import TrainedRanker, trained_rankers
from as2ray.experiments.recipe import NON_EMPTY, RunSpec
from as2ray.experiments.search import BestRanker, SearchConfig, TunedRanker
from as2ray.experiments.stage import plain, sorted_stages
from as2ray.experiments.tables import table_checks, table_stages
from as2ray.losses.distillation import DistillationLoss
from pipelines import distill
from tune_spaces import training_space
from tune_spaces.run_fields import Values, apply_values, list_endpoints

log = logging.getLogger(__name__)

SEARCH_KEYS = ("student", "num_trials", "grace_epochs", "grid", "space")
"""Keys that a recipe of `pipelines.distill` does not have."""

SEARCHED_FIELDS = ("training", "loss")
"""Fields of a run whose values the trials of a space replace."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(distill.Recipe):
    """A recipe of `pipelines.distill`, and the search of one run's settings."""

    student: str = ""
    """The run whose settings are searched, with the first of its seeds."""
    num_trials: PositiveInt = 20
    """Number of trials."""
    grace_epochs: PositiveFloat = 1.0
    """Epochs before a trial may be stopped; at least its warm-up."""
    grid: dict[str, Annotated[list[Any], NON_EMPTY]] = field(default_factory=dict)
    """Values by field of the run, such as `training.learning_rate` or `loss.alpha`. With
    `training.max_steps` the number of updates does not depend on the batch size."""
    space: dict[str, Values] = field(default_factory=dict)
    """Values by field of the run's training or loss, from which Optuna chooses: a list, or `low`,
    `high` and `log`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        students = [
            name
            for name, run in self.runs.items()
            if self.grid or self.space or isinstance(run.loss, DistillationLoss)
        ]
        if self.student not in students:
            raise ConfigError(
                f"student {self.student!r} is not one of the runs to search, {students}; without a "
                "grid or a space they are those with a distillation loss",
                fix="name one with --student",
            )
        if self.grid and self.space:
            raise ConfigError(
                "a search has a grid or a space, not both", fix="leave one of them out"
            )
        for name in self.space:
            # The others are no longer those of a recipe's run when the trials replace them.
            if name.partition(".")[0] not in SEARCHED_FIELDS:
                problem = f"a space cannot have the field {name!r}"
                fix = f"name one of {' or '.join(SEARCHED_FIELDS)}, such as training.epochs"
                raise ConfigError(problem, fix=fix)
        if "training.seed" in self.space and self.seeds_of(self.student)[0]:
            # A recipe adds its seed to that of the run, which the trials replace.
            problem = (
                f"a space cannot have training.seed with seed {self.seeds_of(self.student)[0]}"
            )
            raise ConfigError(problem, fix="set seeds: [0], or search it with a grid")
        choices = [(n, v) for n, values in self.space.items() for v in list_endpoints(values)]
        for point in [*self.points(), *({name: value} for name, value in choices)]:
            self.with_student(apply_values(point, self.runs[self.student]))

    def with_student(self, run: RunSpec) -> distill.Recipe:
        """Returns the recipe with another run in the place of the student.

        Raises:
            ConfigError: The recipe cannot have this run.
        """
        values = {each.name: getattr(self, each.name) for each in fields(distill.Recipe)}
        return distill.Recipe(**{**values, "runs": {**self.runs, self.student: run}})

    def points(self) -> list[dict[str, Any]]:
        """Returns the combinations of the grid."""
        return [dict(zip(self.grid, values)) for values in product(*self.grid.values())]


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: the search of the student, and what the student builds on."""
    experiment = Experiment()
    if recipe.grid:
        run = recipe.runs[recipe.student]
        points = [apply_values(values, run) for values in recipe.points()]
        runs = tuple(_add_student(experiment, recipe, data_dirs, point) for point in points)
        for number, each in enumerate(runs):
            experiment.add(f"grid/{number}", each)
        experiment.add("search", BestRanker(runs))
        return experiment
    student = _add_student(experiment, recipe, data_dirs, recipe.runs[recipe.student])
    space = recipe.space or "distillation"
    search = SearchConfig(space, recipe.num_trials, recipe.grace_epochs)
    experiment.add("search", TunedRanker.create(student, search))
    return experiment


def _add_student(
    experiment: Experiment, recipe: Recipe, data_dirs: Mapping[str, str], run: RunSpec
) -> TrainedRanker:
    """Names the rankers that a run in the place of the student builds on; returns its stage."""
    changed = recipe.with_student(run)
    tables = table_stages(changed, data_dirs)
    rankers = trained_rankers(changed, tables, table_checks(changed, tables))
    student = rankers[recipe.student, changed.seeds_of(recipe.student)[0]]
    needed = set(sorted_stages(student.inputs))
    for (name, seed), ranker in rankers.items():
        if ranker in needed:
            experiment.add(f"rankers/{name}-seed{seed}", ranker)
    return student


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the recipe with the best settings."""
    for search in finished.named("search").values():
        outputs, student = finished.outputs(search), recipe.runs[recipe.student]
        if recipe.grid:
            points, values = recipe.points(), outputs["values"]
            rows = [(*map(str, p.values()), f"{v:.4f}") for p, v in zip(points, values)]
            metric = student.training.selection_metric
            finished.write("grid.md", markdown_table([*recipe.grid, metric], rows))
            choice, value = points[outputs["best"]], max(values)
            best = apply_values(choice, student)
        else:
            choice, value = outputs["choice"], outputs["value"]
            space = training_space(recipe.space or "distillation")
            best = space.apply_params(choice, student)
        log.info("%s: dev %.4f with %s", recipe.student, value, choice)
        values = {key: value for key, value in asdict(recipe).items() if key not in SEARCH_KEYS}
        values["runs"][recipe.student] = asdict(best)
        text = yaml.safe_dump(plain(values), sort_keys=False, width=120)
        finished.write("best.yaml", text.rstrip())


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
