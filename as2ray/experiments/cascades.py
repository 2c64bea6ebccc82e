"""Stages of cascades: made of rankers, replays of scores, a search for drop ratios, times."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.margins import Margins
from as2ray.cascade.pruning import Rounding
from as2ray.cascade.ranker_shape import RankerShape
from as2ray.distributed.score import read_scores
from as2ray.errors import ConfigError
from as2ray.evaluation.cascade_replay import (
    CascadeReplay,
    OperatingPoint,
    cheapest_point,
    pareto_front,
)
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.report import markdown_table
from as2ray.experiments.rankers import (
    RANKER,
    TableScores,
    TrainedRanker,
    replace_fingerprint,
    save_evaluations,
)
from as2ray.experiments.stage import Outputs, Result, Stage, StageContext
from as2ray.experiments.tables import filtered_table, read_table
from as2ray.training.cascade_config import CascadeConfig
from as2ray.training.job import TrainingJob
from tune_spaces import drop_ratios as drop_ratio_space

MARKED_DROP_RATIOS = (0.3, 0.4, 0.5)
"""Drop ratios that Figure 2 marks; each is applied after every exit."""

COST_LABELS = {"relative_layers": "layers", "relative_flops": "operations"}
"""What the x axes of Figure 2 show, by the field of an `OperatingPoint`."""


@config_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DropSearchConfig:
    """How drop ratios and exits are chosen on the dev table."""

    max_map_loss: NonNegativeFloat = 0.005
    """MAP that the chosen point may lose compared with dropping nothing."""
    num_trials: NonNegativeInt = 100
    """Trials of Optuna, in addition to the paper's grid."""
    seed: NonNegativeInt = 0
    """Seed of Optuna's sampler."""


def load_replay(
    context: StageContext, scores: TableScores, rounding: Rounding = "floor"
) -> CascadeReplay:
    """Returns a cascade over a table, from the stored scores of all its exits."""
    outputs, stored = context.outputs(scores), read_scores(context.path(scores))
    exits = [name for name in stored.column_names if name.isdigit()]
    return CascadeReplay(
        filtered_table(context.path(scores.table), scores.question_filter),
        tuple(map(int, exits)),
        np.stack([stored[name].to_numpy() for name in exits], 1),
        stored["tokens"].to_numpy(),
        EncoderShape(**outputs["ranker"]["shape"]),
        outputs["ranker"]["sequential"],
        rounding,
    )


def iter_systems(
    name: str, exit_layers: Sequence[int], drop_ratios: Sequence[float]
) -> Iterator[tuple[str, list[int], float]]:
    """Yields the rows of a cascade's table: system, indices of its exits, and its drop ratio.

    Each exit but the last alone, then all exits with each drop ratio.
    """
    every = list(range(len(exit_layers)))
    for number in every[:-1]:
        yield f"{name}, exit {exit_layers[number]}", [number], 0.0
    for drop_ratio in drop_ratios:
        yield f"{name}, drop {drop_ratio:g}", every, drop_ratio


@dataclass(frozen=True, eq=False)
class SequentialRanker(Stage):
    """Pointwise rankers of growing depth as one ranker, which drops candidates between them."""

    members: tuple[TrainedRanker, ...]

    def check(self, results: Mapping[Stage, Result]) -> None:
        """Checks that every member has more layers than the one before it."""
        shapes = [member.shape(results) for member in self.members]
        num_layers = [shape.num_layers for shape in shapes if shape]
        if num_layers != sorted(set(num_layers)):
            raise ConfigError(
                f"a sequential ranker of members with {num_layers} layers: every ranker needs more "
                "layers than the one before it"
            )

    def run(self, context: StageContext) -> None:
        """Loads the members and saves them as one."""
        from as2ray.checkpoints.initialization import build_sequential
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.saving import save

        folders = [context.path(member) / RANKER for member in self.members]
        ranker = build_sequential([load(folder, device="cpu") for folder in folders])
        save(ranker, context.output / RANKER)


@dataclass(frozen=True, eq=False)
class ReplayEvaluation(Stage):
    """Quality and cost of each exit and drop ratio, replayed over stored scores."""

    VERSION = 3

    scores: TableScores
    name: str
    exit_layers: tuple[int, ...]
    """Exits that are evaluated alone too; empty for a sequential ranker."""
    drop_ratios: tuple[float, ...]
    measures: tuple[str, ...]
    rounding: Rounding = "floor"

    def run(self, context: StageContext) -> Outputs:
        """Replays all of them."""
        replay = load_replay(context, self.scores, self.rounding)
        question_filter = self.scores.question_filter
        results, points, rows = {}, {}, replay.table
        systems = iter_systems(self.name, self.exit_layers, self.drop_ratios)
        for name, exits, drop_ratio in systems:
            exits = exits or list(range(len(replay.exit_layers)))
            keys = replay.rank(exits, drop_ratio).sort_keys
            result = evaluate(rows, keys, self.measures, question_filter=question_filter)
            results[name] = replace_fingerprint(result, context, self.scores.table)
            points[name] = replay.evaluate(exits, drop_ratio)
        return {**save_evaluations(results, context.output), "points": points}


@dataclass(frozen=True, eq=False)
class DropSearch(Stage):
    """The cascade with the cheapest exits and drop ratios that keep its quality on dev."""

    VERSION = 2
    RESOURCES = "pool"

    cascade: Stage
    scores: TableScores
    """Of all exits of the cascade, on the dev table."""
    search: DropSearchConfig
    rounding: Rounding = "floor"

    def run(self, context: StageContext) -> Outputs:
        """Replays the paper's grid in this process, and searches with Optuna under Ray Tune."""
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.saving import save
        from as2ray.distributed.cluster import ray_session
        from as2ray.distributed.tune import search_scores
        from as2ray.models.cascade import CascadeRanker

        replay = load_replay(context, self.scores, self.rounding)
        num_exits = len(replay.exit_layers)
        every = list(range(num_exits))
        ratios_grid = drop_ratio_space.param_grid(num_exits) if num_exits > 1 else ()
        grid = [replay.evaluate(every, ratios) for ratios in ratios_grid]
        # Without trials there is nothing to start Ray for.
        with ray_session() if self.search.num_trials else nullcontext():
            trials = search_scores(
                evaluate_params,
                partial(drop_ratio_space.suggest, num_exits=num_exits),
                {"quality": "max", "cost": "min"},
                replay,
                context.output,
                self.search.num_trials,
                self.search.seed,
            )
        sampled = [_evaluate_trial(params, replay) for params, _ in trials]
        undropped = replay.evaluate(every, 0.0)
        points = [*grid, *sampled, undropped]
        chosen = cheapest_point(points, undropped.map - self.search.max_map_loss)
        series = {"grid": grid, "Optuna": sampled}
        marked = {f"drop {r:g}": replay.evaluate(every, r) for r in MARKED_DROP_RATIOS}
        _draw(context.output, series, marked, points, chosen)
        cascade = load(context.path(self.cascade) / RANKER, device="cpu")
        assert isinstance(cascade, CascadeRanker)
        cascade.prune_exits(chosen.exit_layers)
        cascade.drop_ratios, cascade.rounding = chosen.drop_ratios, self.rounding
        save(cascade, context.output / RANKER)
        return {"chosen": chosen, "undropped": undropped}


@dataclass(frozen=True, eq=False)
class SearchedReplay(Stage):
    """Quality and cost on a test of the exits and drop ratios that were chosen on dev."""

    VERSION = 2

    scores: TableScores
    """Of all exits of the cascade, on the test."""
    search: DropSearch
    measures: tuple[str, ...]

    def run(self, context: StageContext) -> Outputs:
        """Replays the chosen point."""
        replay = load_replay(context, self.scores, self.search.rounding)
        question_filter = self.scores.question_filter
        chosen = OperatingPoint(**context.outputs(self.search)["chosen"])
        exits = [replay.exit_layers.index(layer) for layer in chosen.exit_layers]
        keys = replay.rank(exits, chosen.drop_ratios).sort_keys
        result = evaluate(replay.table, keys, self.measures, question_filter=question_filter)
        point = replay.evaluate(exits, chosen.drop_ratios)
        result = replace_fingerprint(result, context, self.scores.table)
        return {**save_evaluations({"": result}, context.output), "point": point}


def evaluate_params(params: Mapping[str, Any], replay: CascadeReplay) -> dict[str, float]:
    """Returns quality and cost of the exits and drop ratios of a trial."""
    point = _evaluate_trial(params, replay)
    return {"quality": point.map, "cost": point.relative_flops}


def _evaluate_trial(params: Mapping[str, Any], replay: CascadeReplay) -> OperatingPoint:
    return replay.evaluate(*drop_ratio_space.apply_params(params, len(replay.exit_layers)))


@dataclass(frozen=True, eq=False)
class CascadeExits(Stage):
    """Exits on the network of a finished ranker; joint training runs under Ray Train."""

    RESOURCES = "gang"

    ranker: Stage
    """A pointwise ranker."""
    table: Stage
    cascade: CascadeConfig
    """Exits and training, without a bound: cascades with several bounds share their exits."""
    calibration_table: Stage | None = None
    """Other questions, which do not train."""

    def run(self, context: StageContext) -> Outputs:
        """Fits the exits; trains on the workers if the configuration says so."""
        from as2ray.checkpoints.saving import save
        from as2ray.training.frozen_cascade import train_exits
        from as2ray.training.run_job import train

        def train_on_workers(job: TrainingJob, folder: Path) -> Path:
            from as2ray.distributed.train import list_inputs, train_on_ray

            for path in list_inputs(job):
                context.store.publish(Path(path))
            return train_on_ray(job, folder, context.workers, node_files=context.store)

        scratch, calibration = context.scratch / "joint", self.calibration_table
        shutil.rmtree(scratch, ignore_errors=True)
        cascade = train_exits(
            context.path(self.ranker) / RANKER,
            read_table(context.path(self.table)),
            calibration and read_table(context.path(calibration)),
            self.cascade,
            train_job=train_on_workers if context.workers.num_workers else train,
            scratch=scratch,
        )
        save(cascade, context.output / RANKER)
        return {"shape": RankerShape(len(cascade.encoder), cascade.exit_layers)}


@dataclass(frozen=True, eq=False)
class RankerCascade(Stage):
    """A cascade made of a finished ranker: exits whose margins are chosen."""

    RESOURCES, VERSION = "device", 4

    exits: CascadeExits
    ranker: Stage
    """The ranker of the exits; so are the tables."""
    table: Stage
    cascade: CascadeConfig
    """The configuration of the exits, and the bound."""
    calibration_table: Stage | None = None

    def run(self, context: StageContext) -> Outputs:
        """Chooses the margins, and leaves out the exits that are not used."""
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.saving import save
        from as2ray.training.frozen_cascade import choose_margins

        cascade: Any = load(context.path(self.exits) / RANKER)
        calibration = self.calibration_table
        choose_margins(
            cascade,
            context.path(self.ranker) / RANKER,
            read_table(context.path(self.table)),
            calibration and read_table(context.path(calibration)),
            self.cascade,
        )
        save(cascade, context.output / RANKER)
        return {
            "shape": RankerShape(len(cascade.encoder), cascade.exit_layers),
            "drop_ratios": cascade.drop_ratios,
            "margins": cascade.margins and asdict(cascade.margins),
            "bm25_margin": cascade.bm25_margin,
            "bm25_weights": dict(zip(cascade.exit_layers, cascade.bm25_weights)),
        }


@dataclass(frozen=True, eq=False)
class CascadeReplayEvaluation(Stage):
    """Quality and cost of a cascade of a finished ranker, as it drops, replayed on a test."""

    VERSION = 2

    scores: TableScores
    """Of all exits that were trained, on the test."""
    cascade: RankerCascade
    measures: tuple[str, ...]

    def run(self, context: StageContext) -> Outputs:
        """Replays its margins or drop ratios."""
        replay, stored = load_replay(context, self.scores), context.outputs(self.cascade)
        layers = stored["shape"]["exit_layers"]
        if stored["margins"] is None:
            exits = [replay.exit_layers.index(layer) for layer in layers]
            staged = replay.rank(exits, stored["drop_ratios"])
        else:
            margins = Margins.from_settings(stored["margins"])
            weights = {int(layer): weight for layer, weight in stored["bm25_weights"].items()}
            replay, values = replay.with_bm25(weights), margins.values
            if stored["bm25_margin"] is not None:
                layers, values = [0, *layers], (stored["bm25_margin"], *values)
            exits = [replay.exit_layers.index(layer) for layer in layers]
            staged = replay.rank_by_margins(exits, values, margins.top_k)
        result = evaluate(
            replay.table,
            staged.sort_keys,
            self.measures,
            question_filter=self.scores.question_filter,
        )
        point = replay.measure(exits, staged)
        result = replace_fingerprint(result, context, self.scores.table)
        return {**save_evaluations({"": result}, context.output), "point": point}


@dataclass(frozen=True, eq=False)
class RankingTime(Stage):
    """Counted and measured savings of a ranker at some drop ratios."""

    RESOURCES = "device"

    ranker: Stage
    table: Stage
    drop_ratios: tuple[float | None, ...]
    """None stands for the ranker's own drop ratios."""
    num_pairs: int = 1_024
    """Maximum number of pairs over which time is measured."""
    rounding: Rounding = "floor"

    def run(self, context: StageContext) -> Outputs:
        """Ranks the first pairs of the table, with and without dropping, in turn."""
        from as2ray.checkpoints.loading import load
        from as2ray.profiling.savings import measure_savings

        ranker: Any = load(context.path(self.ranker) / RANKER)
        ranker.rounding = self.rounding
        rows = read_table(context.path(self.table))[: self.num_pairs]
        savings = [measure_savings(ranker, rows, ratio) for ratio in self.drop_ratios]
        entries = [{**vars(saving), "speedup": str(saving.speedup)} for saving in savings]
        return {"exit_layers": ranker.exit_layers, "savings": entries}


def _draw(
    folder: Path,
    series: Mapping[str, list[OperatingPoint]],
    marked: Mapping[str, OperatingPoint],
    points: list[OperatingPoint],
    chosen: OperatingPoint,
) -> None:
    """Writes the Pareto front of MAP as a table, and plots every point (Figure 2).

    Each measure has a panel over the cost by the paper's formula, and one over operations.
    """
    from as2ray.evaluation import plots

    rows = [
        (
            ", ".join(map(str, point.exit_layers)),
            ", ".join(f"{ratio:.2f}" for ratio in point.drop_ratios),
            f"{point.map:.4f}",
            f"{100 * point.relative_flops:.1f} %",
            "chosen" if point == chosen else "",
        )
        for point in pareto_front(points)
    ]
    columns = ("exits", "drop ratios", "dev MAP", "operations", "")
    (folder / "pareto.md").write_text(markdown_table(columns, rows) + "\n", encoding="utf-8")

    def panel(cost: str, measure: str) -> plots.ParetoPanel:
        def locate(point: OperatingPoint) -> tuple[float, float]:
            return 100 * getattr(point, cost), point.measures[measure]

        return plots.ParetoPanel(
            f"{COST_LABELS[cost]}, % of the whole encoder's",
            f"{measure} (dev)",
            {name: list(map(locate, group)) for name, group in series.items() if group},
            list(map(locate, pareto_front(points, measure, cost))),
            {name: locate(point) for name, point in marked.items()},
        )

    panels = [[panel(cost, measure) for measure in chosen.measures] for cost in COST_LABELS]
    plots.pareto_plot(panels, "Exits and drop ratios", folder / "pareto.png")
