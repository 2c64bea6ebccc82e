"""The Cascade Transformer: trains cascades, single rankers and sequential rankers; compares them.

    python -m pipelines.cascade --config pipelines/recipes/cascade_minilm.yaml --output DIR

Runs are trained as in any recipe. Then every partial classifier scores every candidate once, and
all drop ratios are replays of these scores: Tables 2 and 3 and Figure 2 of the paper, and the
search for drop ratios and exits that the paper leaves as future work.
"""

from collections.abc import Mapping
from dataclasses import asdict, field
from statistics import mean
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from as2ray.errors import ConfigError
from as2ray.evaluation.cascade_replay import OperatingPoint
from as2ray.evaluation.report import build_report, markdown_table, save_report
from as2ray.experiments.cascades import (
    DropSearch,
    DropSearchConfig,
    RankingTime,
    ReplayEvaluation,
    SearchedReplay,
    SequentialRanker,
    iter_systems,
)
from as2ray.experiments.command import Pipeline
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import TableScores, TrainedRanker, evaluation, trained_rankers
from as2ray.experiments.recipe import Recipe as BaseRecipe
from as2ray.experiments.recipe import check_names
from as2ray.experiments.reports import write_reports
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import leak_checks, table_stages


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(BaseRecipe):
    """Cascades, compared with single rankers and sequential rankers."""

    sequential_rankers: dict[str, list[str]] = field(default_factory=dict)
    """Sequential rankers by name: the runs of their pointwise rankers, fewest layers first."""
    drop_ratios: list[Annotated[float, Field(ge=0, lt=1)]] = field(
        default_factory=lambda: [0.0, 0.3, 0.4, 0.5]
    )
    """Drop ratios to report; each is applied after every exit."""
    search: DropSearchConfig = field(default_factory=DropSearchConfig)
    """Search for drop ratios."""
    measure_speed: bool = True
    """Whether to measure time too, with the first seed of each ranker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("sequential ranker", self.sequential_rankers)
        for name, members in self.sequential_rankers.items():
            if name in self.runs:
                raise ConfigError(f"{name!r} is the name of a run and of a sequential ranker")
            wrong = [run for run in members if run not in self.runs or self.is_cascade(run)]
            if wrong or not members:
                raise ConfigError(
                    f"sequential ranker {name!r} of {members}: its members must be runs that train "
                    "pointwise rankers"
                )
            self.seeds_shared(name, members)

    def systems(self) -> list[str]:
        """Returns pointwise rankers, and the exits, drop ratios and search of each cascade."""
        names = []
        for name in [*self.runs, *self.sequential_rankers]:
            if name in self.runs and not self.is_cascade(name):
                names.append(name)
                continue
            exits = self.exits_of(name) if name in self.runs else ()
            names += [system for system, _, _ in iter_systems(name, exits, self.drop_ratios)]
            names += [f"{name}, searched"] if name in self.runs else []
        return names

    def is_cascade(self, run: str) -> bool:
        """Returns whether a run trains a cascade."""
        return bool(self.exits_of(run))


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: rankers, scores of all their exits, replays, and searched cascades."""
    experiment = Experiment()
    tables = table_stages(recipe, data_dirs)
    for name, table in tables.items():
        experiment.add(f"tables/{name}", table)
    trained = trained_rankers(recipe, tables, leak_checks(recipe, tables))
    for (name, seed), ranker in trained.items():
        experiment.add(f"rankers/{name}-seed{seed}", ranker)
        if recipe.is_cascade(name):
            _add_cascade(experiment, recipe, tables, name, seed, ranker)
            continue
        for test in recipe.tests:
            experiment.compare(test, name, seed, evaluation(recipe, ranker, tables[test]))
    for name, members in recipe.sequential_rankers.items():
        for seed in recipe.seeds_shared(name, members):
            sequential = SequentialRanker(tuple(trained[member, seed] for member in members))
            experiment.add(f"rankers/{name}-seed{seed}", sequential)
            _add_replays(experiment, recipe, tables, name, seed, sequential, ())
    return experiment


def _add_cascade(
    experiment: Experiment,
    recipe: Recipe,
    tables: Mapping[str, Stage],
    name: str,
    seed: int,
    cascade: TrainedRanker,
) -> None:
    """Adds the replays of a cascade, and its search on the dev table of its run."""
    stage_name, exits = f"{name}-seed{seed}", recipe.exits_of(name)
    scores = _add_replays(experiment, recipe, tables, name, seed, cascade, exits)
    dev = TableScores(cascade, cascade.dev, "exits", recipe.question_filter)
    searched = DropSearch(cascade, dev, recipe.search)
    experiment.add(f"searched/{stage_name}", searched)
    for test in recipe.tests:
        replay = SearchedReplay(scores[test], searched, tuple(recipe.measures))
        experiment.add(f"searched-replays/{stage_name}-{test}", replay)
        experiment.compare(test, f"{name}, searched", seed, replay)
    if recipe.measure_speed and seed == recipe.seeds_of(name)[0]:
        first_test = tables[recipe.tests[0]]
        experiment.add(f"times/{stage_name}-searched", RankingTime(searched, first_test, (None,)))


def _add_replays(
    experiment: Experiment,
    recipe: Recipe,
    tables: Mapping[str, Stage],
    name: str,
    seed: int,
    ranker: Stage,
    exits: tuple[int, ...],
) -> dict[str, TableScores]:
    """Adds the evaluations of each exit and drop ratio; returns the scores of all exits by test."""
    stage_name, drop_ratios = f"{name}-seed{seed}", tuple(recipe.drop_ratios)
    scores = {
        test: TableScores(ranker, tables[test], "exits", recipe.question_filter)
        for test in recipe.tests
    }
    for test, stage in scores.items():
        replay = ReplayEvaluation(stage, name, exits, drop_ratios, tuple(recipe.measures))
        experiment.add(f"replays/{stage_name}-{test}", replay)
        for system, _, _ in iter_systems(name, exits, drop_ratios):
            experiment.compare(test, system, seed, replay, system)
    members = recipe.sequential_rankers.get(name, [name])
    if recipe.measure_speed and seed == recipe.seeds_shared(name, members)[0]:
        first_test = tables[recipe.tests[0]]
        experiment.add(f"times/{stage_name}", RankingTime(ranker, first_test, drop_ratios))
    return scores


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the reports: systems, drop ratios compared with none, costs, times."""
    write_reports(recipe, finished)
    for test, systems in finished.evaluations().items():
        for name in [*filter(recipe.is_cascade, recipe.runs), *recipe.sequential_rankers]:
            rows = {s: seeds for s, seeds in systems.items() if s.startswith(f"{name}, ")}
            if (baseline := f"{name}, drop 0") in rows:
                comparison = build_report(f"{name} on {test}", rows, baseline=baseline)
                save_report(comparison, finished.output / f"{test}-{name}.md")
        _write_costs(finished, test)
    if recipe.measure_speed:
        _write_times(finished)


def _write_costs(finished: Finished, test: str) -> None:
    """Writes cost and quality, means over the seeds (last column of Table 3)."""
    points: dict[str, list[OperatingPoint]] = {}
    for name, stage in finished.named("replays/").items():
        if name.endswith(f"-{test}"):
            for system, values in finished.outputs(stage)["points"].items():
                points.setdefault(system, []).append(OperatingPoint(**values))
    for name, stage in finished.named("searched-replays/").items():
        if name.endswith(f"-{test}"):
            system = f"{name.rpartition('-seed')[0]}, searched"
            point = OperatingPoint(**finished.outputs(stage)["point"])
            points.setdefault(system, []).append(point)
    rows = [
        (
            system,
            f"{mean(point.map for point in seeds):.4f}",
            _format_saving(mean(point.relative_layers for point in seeds)),
            _format_saving(mean(point.relative_flops for point in seeds)),
        )
        for system, seeds in points.items()
    ]
    columns = ("system", "MAP", "layers (the paper's formula)", "operations")
    finished.write(f"{test}-cost.md", markdown_table(columns, rows))
    entries = {system: [asdict(point) for point in seeds] for system, seeds in points.items()}
    finished.write_json(f"{test}-cost.json", entries)


def _write_times(finished: Finished) -> None:
    """Writes counted and measured savings of the rankers of each first seed."""
    rows = [
        (
            f"{name.rpartition('-seed')[0]}, exits {', '.join(map(str, outputs['exit_layers']))}",
            ", ".join(f"{ratio:.2f}" for ratio in saving["drop_ratios"]),
            _format_saving(saving["relative_layers"]),
            _format_saving(saving["relative_flops"]),
            saving["speedup"],
        )
        for name, stage in finished.named("times/").items()
        for outputs in [finished.outputs(stage)]
        for saving in outputs["savings"]
    ]
    columns = ("ranker", "drop", "layers", "operations", "times as fast")
    finished.write("time.md", markdown_table(columns, rows))


def _format_saving(relative_cost: float) -> str:
    return f"{100 * (relative_cost - 1):+.1f} %"


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
