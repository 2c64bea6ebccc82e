"""Stages that choose among training runs: a search with Optuna, and the best run of a grid."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as validated_dataclass

from as2ray.experiments.rankers import RANKER, TrainedRanker, copy_ranker
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.training.tracking import METRICS, closing, create_servers, read_metrics
from tune_spaces import training_space
from tune_spaces.run_fields import Values, apply_values, list_endpoints

WARM_UP_FIELDS = tuple(
    f"training.{name}" for name in ("epochs", "max_steps", "warmup_ratio", "warmup_steps")
)
"""Fields of a run that change how long its warm-up takes."""

NEVER = 10_000.0
"""Epochs that no trial reaches, before which none is stopped."""


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SearchConfig:
    """A search for the settings of a training run."""

    space: str | dict[str, Values] = "distillation"
    """Name of a space in `tune_spaces`, or values by field of the run."""
    num_trials: PositiveInt = 20
    """Number of trials."""
    grace_epochs: PositiveFloat = 1.0
    """Epochs before a trial may be stopped; at least its warm-up."""
    seed: NonNegativeInt = 0
    """Seed of Optuna's sampler."""

    def __post_init__(self) -> None:
        training_space(self.space)


@dataclass(frozen=True, eq=False)
class TunedRanker(TrainedRanker):
    """The best ranker of a search with Optuna under Ray Tune for the settings of a run.

    The fields of `TrainedRanker` describe the run, whose settings the trials replace. Trials are
    compared by the measure that selects its checkpoint, or by MAP of the last one.
    """

    VERSION = 2

    search: SearchConfig = field(default_factory=SearchConfig)

    @classmethod
    def create(cls, run: TrainedRanker, search: SearchConfig) -> "TunedRanker":
        """Returns the search for the settings of a run."""
        values = {each.name: getattr(run, each.name) for each in fields(TrainedRanker)}
        return cls(**values, search=search)

    def tuned_run(self, params: Mapping[str, Any]) -> TrainedRanker:
        """Returns the run with the parameters of a trial. Trained alone, it gives equal weights."""
        values = {each.name: getattr(self, each.name) for each in fields(TrainedRanker)}
        space = training_space(self.search.space)
        run: TrainedRanker = space.apply_params(params, TrainedRanker(**values))
        return run

    @property
    def grace_epochs(self) -> float:
        """Epochs before a trial may be stopped: not before the longest warm-up has ended."""
        space = {} if isinstance(self.search.space, str) else self.search.space
        ends = {
            name: list_endpoints(values) for name, values in space.items() if name in WARM_UP_FIELDS
        }
        points = [dict(zip(ends, values)) for values in product(*ends.values())]
        trainings = [apply_values(point, self).training for point in points]
        if any(each.max_steps or each.warmup_steps for each in trainings):
            # How many epochs these are is not known before the tables are read.
            return NEVER
        warm_ups = [each.warmup_ratio * each.epochs for each in trainings]
        return max(self.search.grace_epochs, *warm_ups)

    def run(self, context: StageContext) -> Outputs:
        """Searches; keeps the ranker of the best trial, and the files of the search."""
        from as2ray.distributed.cluster import ray_session
        from as2ray.distributed.tune import search_training

        search, job = self.search, self.job(context)
        space = training_space(search.space)
        trackers = create_servers(job.tracking, job.run)
        with closing(trackers), ray_session():
            result = search_training(
                partial(space.apply_params, student=job),
                space.suggest,
                context.output,
                context.workers,
                search.num_trials,
                self.grace_epochs,
                search.seed,
                context.store,
                self.training.selection_metric,
            )
            copy_ranker(result.ranker, context.output)
            for tracker in trackers:
                tracker.log(0, {self.training.selection_metric: result.value})
                for path in sorted(p for p in context.output.iterdir() if p.is_file()):
                    tracker.log_file(path)
        shutil.copy(result.run_folder / METRICS, context.output)
        return {
            **self.outputs(context),
            "choice": result.params,
            "value": result.value,
            "failed_trials": result.failed_trials,
        }

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        return {**super().describe(), "hours": self.hours()}

    def hours(self) -> float:
        """Returns the hours of all trials, as if none were stopped."""
        return self.search.num_trials * super().hours()


@dataclass(frozen=True, eq=False)
class BestRanker(Stage):
    """Of several runs, such as those of a grid, the ranker with the highest measure on dev.

    It is the measure that selects their checkpoints, or MAP of the last one.
    """

    VERSION = 2

    rankers: tuple[TrainedRanker, ...]

    def run(self, context: StageContext) -> Outputs:
        """Compares the measure of the selected checkpoint of each run."""
        values = []
        for ranker in self.rankers:
            metric = ranker.training.selection_metric
            lines = read_metrics(context.path(ranker) / METRICS)
            measured = [line[metric] for line in lines if metric in line]
            values.append(measured[-1] if ranker.training.select_by == "epoch" else max(measured))
        best = values.index(max(values))
        copy_ranker(context.path(self.rankers[best]) / RANKER, context.output)
        shape = context.outputs(self.rankers[best])["shape"]
        return {"best": best, "values": values, "shape": shape}
