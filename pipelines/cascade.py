"""The Cascade Transformer: train cascades, monoliths and sequential rankers, search, compare.

    python -m pipelines.cascade --config pipelines/recipes/cascade_minilm.yaml --output DIR

Training is that of any recipe. Every partial classifier then scores every candidate once, and
all drop ratios are replays of these scores: Tables 2 and 3 and Figure 2 of the paper, and the
search for drop ratios and exits that the paper leaves as future work.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean

from as2ray.cascade.pruning import expand_drop_ratios
from as2ray.checkpoints.initialization import build_sequential
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.plan import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.cascade_replay import OperatingPoint
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.stage import digest, stage
from as2ray.profiling.savings import measure_savings
from pipelines.drop_search import Search, replays, search_drop_ratios
from pipelines.experiment import Found, check_runs, prepare, train_runs, write_reports
from pipelines.recipe import Recipe as Steps
from pipelines.recipe import check_names, command
from pipelines.steps import evaluate_ranker, table

log = logging.getLogger(__name__)

TIMED = 1_024
"""Pairs of the first test, at most, over which the clock is asked."""


@dataclass(frozen=True)
class Recipe(Steps):
    """Cascades beside monoliths and sequential rankers."""

    sequential_rankers: dict[str, list[str]] = field(default_factory=dict)
    """Sequential rankers by name: steps of pointwise rankers, the shallowest first."""
    drop_ratios: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.4, 0.5])
    """Drop ratios to report, each the same after every exit."""
    search: Search = field(default_factory=Search)
    """How drop ratios are searched."""
    measure_speed: bool = True
    """Whether the clock is asked too, with each ranker's first seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("sequential ranker", self.sequential_rankers)
        for drop in self.drop_ratios:
            expand_drop_ratios(drop, 2)
        for name, steps in self.sequential_rankers.items():
            wrong = [s for s in steps if s not in self.runs or self.is_cascade(s)]
            if wrong or not steps or name in self.runs:
                raise ConfigError(
                    f"sequential ranker {name!r} of steps {steps}"
                    "; expected a name of its own, and steps that train pointwise rankers",
                    fix="describe them under `steps`",
                )
            self.seeds_shared(name, steps)

    def systems(self) -> list[str]:
        """A pointwise ranker; of a cascade each exit, each drop ratio and the searched ones."""
        names = []
        for name in [*self.runs, *self.sequential_rankers]:
            if name in self.runs and not self.is_cascade(name):
                names.append(name)
                continue
            exits = self.exits_of(name) if name in self.runs else ()
            names += [system for system, _, _ in _systems(self, name, exits)]
            names += [f"{name}, searched"] if name in self.runs else []
        return names

    def is_cascade(self, step: str) -> bool:
        """Whether a step trains a cascade."""
        return bool(self.exits_of(step))


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
    _refuse_unordered(recipe, folder)
    tables = prepare(recipe, folder / "tables", data_dirs or {})
    found: Found = {test: {} for test in recipe.tests}
    costs: dict[str, dict[str, list[OperatingPoint]]] = {test: {} for test in recipe.tests}
    for name, seed, ranker in _all(recipe, folder, workers, tables):
        for test, system, evaluation, point in _measured(recipe, folder, name, ranker, tables):
            found[test].setdefault(system, {})[seed] = evaluation
            if point is not None:
                costs[test].setdefault(system, []).append(point)
    write_reports(recipe, folder, found)
    for test, points in costs.items():
        _tell_costs(folder, test, points)
        _tell_drops(recipe, folder, test, found[test])
    if recipe.measure_speed:
        _tell_times(recipe, folder, tables)


def _refuse_unordered(recipe: Recipe, folder: Path) -> None:
    """Sequential rankers that could not be made of their members, once these are trained."""
    held = check_runs(recipe, folder)
    for name, steps in recipe.sequential_rankers.items():
        depths = [held[step].depth for step in steps]
        if any(a >= b for a, b in pairwise(depths)):
            raise ConfigError(
                f"sequential ranker {name!r} of {dict(zip(steps, depths))} layers"
                "; expected rankers of growing depth",
                fix="name the shallowest first",
            )


def _all(
    recipe: Recipe, folder: Path, workers: WorkersConfig, tables: Mapping[str, Path]
) -> Iterator[tuple[str, int, Path]]:
    """Every ranker, the sequential ones after those that they are made of."""
    done: dict[tuple[str, int], Path] = {}
    for name, seed, made in train_runs(recipe, folder, workers, tables):
        done[name, seed] = made
        yield name, seed, made
        for sequential, steps in recipe.sequential_rankers.items():
            if all((step, seed) in done for step in steps) and (sequential, seed) not in done:
                members = [done[step, seed] for step in steps]
                made = _in_sequence(folder / "rankers" / f"{sequential}-seed{seed}", members)
                done[sequential, seed] = made
                yield sequential, seed, made


def _in_sequence(folder: Path, members: list[Path]) -> Path:
    identity = {"members": [digest(member) for member in members]}

    def make(part: Path) -> None:
        loaded = [load(member / "ranker", device="cpu") for member in members]
        save(build_sequential(loaded), part / "ranker")

    return stage(folder, identity, make)


def _measured(
    recipe: Recipe, folder: Path, name: str, ranker: Path, tables: Mapping[str, Path]
) -> Iterator[tuple[str, str, EvaluationResult, OperatingPoint | None]]:
    """(test, system, evaluation, cost) of all that a ranker is measured as."""
    tests = {test: tables[test] for test in recipe.tests}
    how = (recipe.measures, recipe.question_filter)
    if name in recipe.runs and not recipe.is_cascade(name):
        for test, found in evaluate_ranker(
            folder / "runs" / ranker.name, ranker, tests, *how
        ).items():
            yield test, name, found, None
        return
    step = recipe.runs.get(name) or recipe.runs[recipe.sequential_rankers[name][-1]]
    dev = step.dev or recipe.dev
    stored = replays(folder, ranker, {**tests, "dev": tables[dev]}, recipe.question_filter)
    for test in tests:
        for system, used, drop in _systems(recipe, name, stored[test].exit_layers):
            replay = stored[test]
            scores = replay.rank(used, drop).sort_keys
            evaluation = evaluate(
                replay.table, scores, recipe.measures, question_filter=recipe.question_filter
            )
            yield test, system, evaluation, replay.evaluate(used, drop)
    if name in recipe.runs:
        made, chosen = search_drop_ratios(folder, ranker, stored["dev"], recipe.search)
        used = [stored["dev"].exit_layers.index(layer) for layer in chosen.exit_layers]
        runs = folder / "runs" / f"{ranker.name}-searched"
        for test, found in evaluate_ranker(runs, made, tests, *how).items():
            yield test, f"{name}, searched", found, stored[test].evaluate(used, chosen.drop_ratios)


def _systems(
    recipe: Recipe, name: str, exits: Sequence[int]
) -> Iterator[tuple[str, list[int], float]]:
    """Rows of the table: each exit alone, then all with each drop ratio."""
    every = list(range(len(exits)))
    if name in recipe.runs:
        for number in every[:-1]:
            yield f"{name}, exit {exits[number]}", [number], 0.0
    for drop in recipe.drop_ratios:
        yield f"{name}, drop {drop:g}", every, drop


def _tell_drops(
    recipe: Recipe, folder: Path, test: str, found: Mapping[str, Mapping[int, EvaluationResult]]
) -> None:
    """Each ranker that drops against itself dropping nothing, where that is among the drops."""
    for name in [*filter(recipe.is_cascade, recipe.runs), *recipe.sequential_rankers]:
        own = {system: seeds for system, seeds in found.items() if system.startswith(f"{name}, ")}
        if f"{name}, drop 0" in own:
            made = build_report(f"{name} on {test}", own, baseline=f"{name}, drop 0")
            save_report(made, folder / f"{test}-{name}.md")
            log.info("\n%s", to_markdown(made))


def _tell_costs(folder: Path, test: str, points: Mapping[str, list[OperatingPoint]]) -> None:
    """Cost and quality side by side, means over the seeds (Table 3's last column)."""
    lines = ["| system | MAP | layers (the paper's formula) | operations |", "|---|---|---|---|"]
    for system, seeds in points.items():
        layers, counted = (
            100 * (mean(of) - 1)
            for of in zip(*((p.relative_layers, p.relative_flops) for p in seeds))
        )
        quality = mean(point.map for point in seeds)
        lines.append(f"| {system} | {quality:.4f} | {layers:+.1f} % | {counted:+.1f} % |")
    (folder / f"{test}-cost.md").write_text("\n".join(lines) + "\n")
    dump = {system: [asdict(point) for point in seeds] for system, seeds in points.items()}
    (folder / f"{test}-cost.json").write_text(json.dumps(dump, indent=2) + "\n")


def _tell_times(recipe: Recipe, folder: Path, tables: Mapping[str, Path]) -> None:
    """Counted and measured savings side by side, with the rankers of each one's first seed."""
    rows = table(tables[recipe.tests[0]])[:TIMED]
    lines = ["| ranker | drop | layers | operations | times as fast |", "|" + "---|" * 5]
    for name in [*filter(recipe.is_cascade, recipe.runs), *recipe.sequential_rankers]:
        seed = recipe.seeds_shared(name, recipe.sequential_rankers.get(name, [name]))[0]
        stage = f"{name}-seed{seed}"
        drops: list[tuple[str, float | None]] = [("rankers", drop) for drop in recipe.drop_ratios]
        for where, drop in [*drops, *([("searched", None)] if name in recipe.runs else [])]:
            ranker = load(folder / where / stage / "ranker")
            found = measure_savings(ranker, rows, drop)
            what = f"{name}, exits {', '.join(map(str, ranker.exit_layers))}"
            ratios = ", ".join(f"{ratio:.2f}" for ratio in found.drop_ratios)
            saved = (
                f"{100 * (part - 1):+.1f} %"
                for part in (found.relative_layers, found.relative_flops)
            )
            lines.append(f"| {what} | {ratios} | {' | '.join(saved)} | {found.speedup} |")
    (folder / "time.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """The command line."""
    command(Recipe, run, searches=True)


if __name__ == "__main__":
    main()
