"""Searches the distillation settings of one student with Ray Tune; writes the best as a recipe.

    python -m pipelines.search --config RECIPE --student RUN --output DIR

The recipe is one of `pipelines.distill`. The rankers that the student builds on are trained once.
Each trial trains the student; bad trials are stopped early. `DIR/search` shows the trials, and
`DIR/best.yaml` is the recipe with the best settings, for `pipelines.distill`, which finds the
rankers that the student builds on in the store. An interrupted search continues.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict

import yaml
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.errors import ConfigError
from as2ray.experiments.command import Pipeline
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import TrainedRanker, trained_rankers
from as2ray.experiments.search import SearchConfig, TunedRanker
from as2ray.experiments.stage import plain, sorted_stages
from as2ray.experiments.tables import leak_checks, table_stages
from as2ray.losses.distillation import DistillationLoss
from pipelines import distill
from tune_spaces import distillation

log = logging.getLogger(__name__)

SEARCH_KEYS = ("student", "num_trials", "grace_epochs")
"""Keys that a recipe of `pipelines.distill` does not have."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(distill.Recipe):
    """A recipe of `pipelines.distill`, and the search of one student's settings."""

    student: str = ""
    """The run whose settings are searched, with the first of its seeds."""
    num_trials: PositiveInt = 20
    """Number of trials."""
    grace_epochs: PositiveFloat = 1.0
    """Epochs before a trial may be stopped; at least its warm-up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        students = [n for n, run in self.runs.items() if isinstance(run.loss, DistillationLoss)]
        if self.student not in students:
            raise ConfigError(
                f"student {self.student!r} is not one of the runs with a distillation loss: "
                f"{students}",
                fix="name one with --student",
            )


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: the search of the student, and what the student builds on."""
    experiment = Experiment()
    tables = table_stages(recipe, data_dirs)
    rankers = trained_rankers(recipe, tables, leak_checks(recipe, tables))
    student = rankers[recipe.student, recipe.seeds_of(recipe.student)[0]]
    assert isinstance(student, TrainedRanker)
    needed = set(sorted_stages(student.inputs))
    for (name, seed), ranker in rankers.items():
        if ranker in needed:
            experiment.add(f"rankers/{name}-seed{seed}", ranker)
    search = SearchConfig("distillation", recipe.num_trials, recipe.grace_epochs)
    experiment.add("search", TunedRanker.create(student, search))
    return experiment


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the recipe with the best settings."""
    for search in finished.named("search").values():
        outputs = finished.outputs(search)
        log.info("%s: dev MAP %.4f with %s", recipe.student, outputs["value"], outputs["choice"])
        best = distillation.apply_params(outputs["choice"], recipe.runs[recipe.student])
        values = {key: value for key, value in asdict(recipe).items() if key not in SEARCH_KEYS}
        values["runs"][recipe.student] = asdict(best)
        text = yaml.safe_dump(plain(values), sort_keys=False, width=120)
        finished.write("best.yaml", text.rstrip())


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
