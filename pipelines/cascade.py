"""The Cascade Transformer: trains cascades, single rankers and sequential rankers; compares them.

    python -m pipelines.cascade --config pipelines/recipes/cascade_minilm.yaml --output DIR

Runs are trained as in any recipe. Then every partial classifier scores every candidate once, and
all drop ratios are replays of these scores: Tables 2 and 3 and Figure 2 of the paper, and the
search for drop ratios and exits that the paper leaves as future work.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from statistics import mean
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from as2ray.cascade.pruning import Rounding
from as2ray.errors import ConfigError
from as2ray.evaluation.report import build_report, markdown_table, save_report
from as2ray.experiments.cascades import (
    CascadeExits,
    CascadeReplayEvaluation,
    DropSearch,
    DropSearchConfig,
    RankerCascade,
    RankingTime,
    ReplayEvaluation,
    SearchedReplay,
    SequentialRanker,
    iter_systems,
)
from as2ray.experiments.command import Pipeline
from as2ray.experiments.comparison import check_members, start_experiment
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import TableScores, TrainedRanker, evaluation, trained_rankers
from as2ray.experiments.recipe import Recipe as BaseRecipe
from as2ray.experiments.recipe import check_names
from as2ray.experiments.reports import write_reports
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import table_checks
from as2ray.training.cascade_config import CascadeConfig
from as2ray.training.tracking import METRICS, read_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RankerCascadeSpec:
    """A cascade that is made of a finished ranker."""

    ranker: str
    """Run of the ranker, which is pointwise."""
    table: str
    """Table whose questions train the exits."""
    calibration_table: str | None = None
    """Table of other questions, which choose the margins; by default a quarter of the table."""
    cascade: CascadeConfig = field(default_factory=CascadeConfig)
    """Exits, bound and training."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BoundSpec:
    """A cascade of a ranker, a ranker on the same test, and what may separate them."""

    cascade: str
    """One of `ranker_cascades`."""
    test: str
    """Test on which both are evaluated."""
    baseline: str
    """Run of the ranker: the cascade's, or one of the same training budget."""
    max_cost: Annotated[float, Field(gt=0, le=1)]
    """Share of the ranker's operations that the cascade may take, a mean over the seeds."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(BaseRecipe):
    """Cascades, compared with single rankers and sequential rankers."""

    sequential_rankers: dict[str, list[str]] = field(default_factory=dict)
    """Sequential rankers by name: the runs of their pointwise rankers, fewest layers first."""
    drop_ratios: list[Annotated[float, Field(ge=0, lt=1)]] = field(
        default_factory=lambda: [0.0, 0.3, 0.4, 0.5]
    )
    """Drop ratios to report; each is applied after every exit."""
    ranker_cascades: dict[str, RankerCascadeSpec] = field(default_factory=dict)
    """Cascades by name that are made of pointwise rankers of the recipe."""
    run_tests: dict[str, list[str]] = field(default_factory=dict)
    """Tests of a run and of the cascades that are made of it; by default all."""
    bounds: dict[str, list[BoundSpec]] = field(default_factory=dict)
    """Reports of what cascades lose, by name; each pools the questions of its tests."""
    rounding: Rounding = "floor"
    """How many candidates a drop ratio drops: rounded down, or to the nearest number, as in the
    paper's example."""
    search: DropSearchConfig = field(default_factory=DropSearchConfig)
    """Search for drop ratios."""
    measure_speed: bool = True
    """Whether to measure time too, with the first seed of each ranker."""
    published_costs: dict[str, float] = field(default_factory=dict)
    """Cost that Table 3 prints, by system: -0.37 saves 37 % of the whole encoder's layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        pointwise = [name for name in self.runs if not self.is_cascade(name)]
        check_members(self, "sequential ranker", self.sequential_rankers, pointwise)
        members = {name: [spec.ranker] for name, spec in self.ranker_cascades.items()}
        check_members(self, "cascade of a ranker", members, pointwise)
        for name, spec in self.ranker_cascades.items():
            names = {spec.table, spec.calibration_table} - {None}
            if not names <= self.tables.keys() or names & set(self.tests):
                raise ConfigError(
                    f"cascade {name!r} is made with the tables {sorted(map(str, names))}; choose "
                    f"among {sorted(self.tables.keys() - set(self.tests))}, which are no tests"
                )
        if unknown := sorted(self.published_costs.keys() - set(self.systems())):
            raise ConfigError(f"published_costs of {unknown}; the systems are {self.systems()}")
        self._check_bounds()

    def _check_bounds(self) -> None:
        check_names("report", self.bounds)
        for run, tests in self.run_tests.items():
            if run not in self.runs or not tests or not set(tests) <= set(self.tests):
                raise ConfigError(
                    f"run_tests has {tests} for {run!r}; the runs are {list(self.runs)}, and the "
                    f"tests {self.tests}"
                )
        for name, bounds in self.bounds.items():
            for bound in bounds:
                if bound.cascade not in self.ranker_cascades or bound.baseline not in self.runs:
                    raise ConfigError(
                        f"the bound {name!r} compares {bound.cascade!r} with {bound.baseline!r}; "
                        f"choose one of {list(self.ranker_cascades)} and one of {list(self.runs)}"
                    )
                ranker = self.ranker_cascades[bound.cascade].ranker
                for run in (ranker, bound.baseline):
                    if bound.test not in self.tests_of(run):
                        raise ConfigError(
                            f"the bound {name!r} is on {bound.test!r}; {run!r} is evaluated on "
                            f"{self.tests_of(run)}"
                        )
                if self.seeds_of(ranker) != self.seeds_of(bound.baseline):
                    raise ConfigError(
                        f"the bound {name!r} compares runs of the seeds {self.seeds_of(ranker)} "
                        f"and {self.seeds_of(bound.baseline)}, which must be the same"
                    )
            if not bounds or len({bound.test for bound in bounds}) < len(bounds):
                raise ConfigError(f"the bound {name!r} needs one entry for each of its tests")

    def held_out(self) -> set[str]:
        """Adds the tables that choose margins: they must not lose the questions of dev tables."""
        specs = self.ranker_cascades.values()
        return super().held_out() | {t for spec in specs if (t := spec.calibration_table)}

    def tests_of(self, run: str) -> list[str]:
        """Returns the tests that a run is evaluated on."""
        return self.run_tests.get(run, self.tests)

    def systems(self) -> list[str]:
        """Returns pointwise rankers, and the exits, drop ratios and search of each cascade."""
        names = []
        for name in [*self.runs, *self.sequential_rankers]:
            if name in self.runs and not self.is_cascade(name):
                names.append(name)
                continue
            exits = self.exits_of(name) if name in self.runs else ()
            names += [system for system, _, _ in iter_systems(name, exits, self.drop_ratios)]
            names += [f"{name}, searched"] if exits else []
        return [*names, *self.ranker_cascades]

    def is_cascade(self, run: str) -> bool:
        """Returns whether a run trains a cascade."""
        return bool(self.exits_of(run))


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: rankers, scores of all their exits, replays, and searched cascades."""
    experiment, tables = start_experiment(recipe, data_dirs)
    trained = trained_rankers(recipe, tables, table_checks(recipe, tables))
    rankers: dict[tuple[str, int], Stage] = {**trained}
    for name, members in recipe.sequential_rankers.items():
        for seed in recipe.seeds_shared(name, members):
            rankers[name, seed] = SequentialRanker(tuple(trained[run, seed] for run in members))
    first_seeds: dict[str, int] = {}
    drop_ratios, measures = tuple(recipe.drop_ratios), tuple(recipe.measures)
    for (name, seed), ranker in rankers.items():
        stage_name, first_test = f"{name}-seed{seed}", tables[recipe.tests[0]]
        is_timed = recipe.measure_speed and first_seeds.setdefault(name, seed) == seed
        experiment.add(f"rankers/{stage_name}", ranker)
        if name in recipe.runs and not recipe.is_cascade(name):
            for test in recipe.tests_of(name):
                experiment.compare(test, name, seed, evaluation(recipe, ranker, tables[test]))
            continue
        tests = recipe.tests_of(name)
        scores = {test: _exit_scores(recipe, ranker, tables[test]) for test in tests}
        exits = recipe.exits_of(name) if name in recipe.runs else ()
        for test, stage in scores.items():
            replay = ReplayEvaluation(stage, name, exits, drop_ratios, measures, recipe.rounding)
            experiment.add(f"replays/{stage_name}-{test}", replay)
            for system, _, _ in iter_systems(name, exits, drop_ratios):
                experiment.compare(test, system, seed, replay, system)
        if is_timed:
            experiment.add(
                f"times/{stage_name}",
                RankingTime(ranker, first_test, drop_ratios, rounding=recipe.rounding),
            )
        if not isinstance(ranker, TrainedRanker):
            continue
        dev = ranker.dev or tables[recipe.dev]
        on_dev = _exit_scores(recipe, ranker, dev)
        search = DropSearch(ranker, on_dev, recipe.search, recipe.rounding)
        searched = experiment.add(f"searched/{stage_name}", search)
        for test, stage in scores.items():
            chosen = SearchedReplay(stage, searched, measures)
            experiment.add(f"searched-replays/{stage_name}-{test}", chosen)
            experiment.compare(test, f"{name}, searched", seed, chosen)
        if is_timed:
            time = RankingTime(searched, first_test, (None,), rounding=recipe.rounding)
            experiment.add(f"times/{stage_name}-searched", time)
    _add_ranker_cascades(experiment, recipe, tables, trained)
    return experiment


def _add_ranker_cascades(
    experiment: Experiment,
    recipe: Recipe,
    tables: Mapping[str, Stage],
    trained: Mapping[tuple[str, int], TrainedRanker],
) -> None:
    measures = tuple(recipe.measures)
    for name, spec in recipe.ranker_cascades.items():
        for seed in recipe.seeds_of(spec.ranker):
            ranker, table = trained[spec.ranker, seed], tables[spec.table]
            calibration = tables[spec.calibration_table] if spec.calibration_table else None
            config = replace(spec.cascade, seed=spec.cascade.seed + seed)
            exits = CascadeExits(ranker, table, config.without_bound(), calibration)
            cascade = RankerCascade(exits, ranker, table, config, calibration)
            experiment.add(f"cascade-exits/{name}-seed{seed}", exits)
            experiment.add(f"ranker-cascades/{name}-seed{seed}", cascade)
            for test in recipe.tests_of(spec.ranker):
                scores = _exit_scores(recipe, exits, tables[test])
                replay = CascadeReplayEvaluation(scores, cascade, measures)
                experiment.add(f"replays/{name}-seed{seed}-{test}", replay)
                experiment.compare(test, name, seed, replay)


def _exit_scores(recipe: Recipe, ranker: Stage, table: Stage) -> TableScores:
    return TableScores(ranker, table, "exits", recipe.question_filter)


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the reports: systems, drop ratios compared with none, costs, times."""
    write_reports(recipe, finished)
    for test, systems in finished.evaluations().items():
        for name in [*filter(recipe.is_cascade, recipe.runs), *recipe.sequential_rankers]:
            rows = {s: seeds for s, seeds in systems.items() if s.startswith(f"{name}, ")}
            if (baseline := f"{name}, drop 0") in rows:
                comparison = build_report(f"{name} on {test}", rows, baseline=baseline)
                save_report(comparison, finished.output / f"{test}-{name}.md")
        _write_costs(recipe, finished, test)
    for name in filter(recipe.is_cascade, recipe.runs):
        _plot_exits(finished, name)
    for name, bounds in recipe.bounds.items():
        _write_bounds(recipe, finished, name, bounds)
    if recipe.measure_speed:
        _write_times(finished)


def _write_bounds(
    recipe: Recipe, finished: Finished, name: str, bounds: Sequence[BoundSpec]
) -> None:
    """Writes what cascades lose, of the seeds and tests that are complete."""
    from as2ray.evaluation.loss_bounds import ComparedCascade, compare_losses, format_losses

    compared, results = [], finished.evaluations()
    for bound in bounds:
        systems = results.get(bound.test, {})
        cascades, rankers = (systems.get(n, {}) for n in (bound.cascade, bound.baseline))
        expected = recipe.seeds_of(bound.baseline)
        seeds = [seed for seed in expected if seed in cascades and seed in rankers]
        if seeds != expected:
            log.warning("bound %s: of %s the seeds %s are there", name, bound.cascade, seeds)
        if not seeds:
            continue
        stages = finished.experiment.evaluations
        replays = (stages[bound.test, bound.cascade, seed][0] for seed in seeds)
        each = ComparedCascade(
            bound.test,
            bound.cascade,
            bound.baseline,
            [cascades[seed].per_question for seed in seeds],
            [rankers[seed].per_question for seed in seeds],
            [finished.outputs(replay)["point"]["relative_flops"] for replay in replays],
            bound.max_cost,
        )
        compared.append(each)
    if compared:
        rows = compare_losses(compared)
        finished.write(f"bound-{name}.md", format_losses(rows))
        finished.write_json(f"bound-{name}.json", [asdict(row) for row in rows])


def _plot_exits(finished: Finished, run: str) -> None:
    """Plots the dev MAP of each exit of a cascade over its training (section 4.3.1)."""
    from as2ray.evaluation import plots

    series: dict[str, list[tuple[float, float]]] = {}
    for name, stage in finished.named("rankers/").items():
        if name.rpartition("-seed")[0] == run:
            for line in read_metrics(finished.path(stage) / METRICS):
                for key in filter(re.compile("dev/AP/exit_").match, line):
                    point = (line["epoch"], line[key])
                    series.setdefault(key.rpartition("/")[2], []).append(point)
    if series:
        path = finished.output / f"{run}-exits.png"
        plots.learning_curve(series, run, "epochs", "MAP (dev)", path)


def _write_costs(recipe: Recipe, finished: Finished, test: str) -> None:
    """Writes cost and quality, means over the seeds (last column of Table 3).

    A ranker of fewer layers costs their share of the deepest run's (the paper's formula).
    """
    points: dict[str, list[dict[str, Any]]] = {}
    results = finished.evaluations().get(test, {})
    depths = {
        name.rpartition("-seed")[0]: finished.outputs(stage)["shape"]["num_layers"]
        for name, stage in finished.named("rankers/").items()
        if "shape" in finished.outputs(stage)
    }
    for (of_test, system, seed), (stage, name) in finished.experiment.evaluations.items():
        if of_test != test or not finished.has(stage):
            continue
        outputs = finished.outputs(stage)
        point = outputs.get("points", {}).get(name, outputs.get("point"))
        if point is None:
            measures = results[system][seed].measures
            cost = depths[system] / max(depths.values())
            point = {"measures": measures, "relative_layers": cost}
        points.setdefault(system, []).append(point)
    rows = []
    for system, seeds in points.items():
        aps = [point["measures"]["AP"] for point in seeds if "AP" in point["measures"]]
        cells = [f"{mean(aps):.4f}" if aps else ""]
        for key, show in {
            "relative_layers": _format_saving,
            "relative_flops": _format_saving,
            "last_exit_hit_rate": "{:.1%}".format,
        }.items():
            values = [point[key] for point in seeds if key in point]
            cells.append(show(mean(values)) if values else "")
        printed = recipe.published_costs.get(system)
        rows.append((system, *cells, "" if printed is None else f"{printed:+.0%}"))
    columns = (
        *("system", "MAP", "layers (the paper's formula)", "operations"),
        *("questions with a positive at the last exit", "layers as printed"),
    )
    finished.write(f"{test}-cost.md", markdown_table(columns, rows))
    finished.write_json(f"{test}-cost.json", points)


def _write_times(finished: Finished) -> None:
    """Writes counted and measured savings of the rankers of each first seed."""
    rows = []
    for name, stage in finished.named("times/").items():
        exits = ", ".join(map(str, finished.outputs(stage)["exit_layers"]))
        for saving in finished.outputs(stage)["savings"]:
            ratios = ", ".join(f"{ratio:.2f}" for ratio in saving["drop_ratios"])
            costs = (_format_saving(saving[f"relative_{kind}"]) for kind in ("layers", "flops"))
            ranker = f"{name.rpartition('-seed')[0]}, exits {exits}"
            rows.append((ranker, ratios, *costs, saving["speedup"]))
    columns = ("ranker", "drop", "layers", "operations", "times as fast")
    finished.write("time.md", markdown_table(columns, rows))


def _format_saving(relative_cost: float) -> str:
    return f"{100 * (relative_cost - 1):+.1f} %"


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
