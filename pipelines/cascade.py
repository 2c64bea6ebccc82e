"""The Cascade Transformer: trains cascades, single rankers and sequential rankers; compares them.

    python -m pipelines.cascade --config pipelines/recipes/cascade_minilm.yaml --output DIR

Runs are trained as in any recipe. Then every partial classifier scores every candidate once, and
all drop ratios are replays of these scores: Tables 2 and 3 and Figure 2 of the paper, and the
search for drop ratios and exits that the paper leaves as future work.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from as2ray.checkpoints.initialization import build_sequential
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.cascade_replay import OperatingPoint
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.stage import digest, stage
from as2ray.profiling.savings import measure_savings
from pipelines.drop_search import Search, replays, search_drop_ratios
from pipelines.experiment import Found, check_runs, prepare, train_runs, write_reports
from pipelines.recipe import Recipe as BaseRecipe
from pipelines.recipe import check_names, command
from pipelines.steps import evaluate_ranker, table

log = logging.getLogger(__name__)

TIMED_PAIRS = 1_024
"""Maximum number of pairs of the first test over which time is measured."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(BaseRecipe):
    """Cascades, compared with single rankers and sequential rankers."""

    sequential_rankers: dict[str, list[str]] = field(default_factory=dict)
    """Sequential rankers by name: the runs of their pointwise rankers, fewest layers first."""
    drop_ratios: list[Annotated[float, Field(ge=0, lt=1)]] = field(
        default_factory=lambda: [0.0, 0.3, 0.4, 0.5]
    )
    """Drop ratios to report; each is applied after every exit."""
    search: Search = field(default_factory=Search)
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
            names += [system for system, _, _ in _systems(self, name, exits)]
            names += [f"{name}, searched"] if name in self.runs else []
        return names

    def is_cascade(self, run: str) -> bool:
        """Returns whether a run trains a cascade."""
        return bool(self.exits_of(run))


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Trains and evaluates what does not exist yet, and writes the reports.

    Args:
        recipe: Tables, runs and systems.
        output: Folder of the stages.
        workers: Part of the cluster to use.
        data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.
    """
    folder = Path(output).resolve()
    _check_sequential_rankers(recipe, folder)
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
        _write_costs(folder, test, points)
        _report_drop_ratios(recipe, folder, test, found[test])
    if recipe.measure_speed:
        _write_times(recipe, folder, tables)


def _check_sequential_rankers(recipe: Recipe, folder: Path) -> None:
    """Checks before training that each sequential ranker can be made of its members."""
    shapes = check_runs(recipe, folder)
    for name, members in recipe.sequential_rankers.items():
        num_layers = [shapes[member].num_layers for member in members]
        if any(a >= b for a, b in pairwise(num_layers)):
            raise ConfigError(
                f"sequential ranker {name!r} of {dict(zip(members, num_layers))} layers: every "
                "ranker needs more layers than the one before it"
            )


def _all(
    recipe: Recipe, folder: Path, workers: WorkersConfig, tables: Mapping[str, Path]
) -> Iterator[tuple[str, int, Path]]:
    """Yields every ranker; sequential ones after their members."""
    done: dict[tuple[str, int], Path] = {}
    for name, seed, made in train_runs(recipe, folder, workers, tables):
        done[name, seed] = made
        yield name, seed, made
        for sequential, steps in recipe.sequential_rankers.items():
            if all((step, seed) in done for step in steps) and (sequential, seed) not in done:
                members = [done[step, seed] for step in steps]
                made = _make_sequential(folder / "rankers" / f"{sequential}-seed{seed}", members)
                done[sequential, seed] = made
                yield sequential, seed, made


def _make_sequential(folder: Path, members: list[Path]) -> Path:
    inputs = {"members": [digest(member) for member in members]}

    def make(part: Path) -> None:
        loaded = [load(member / "ranker", device="cpu") for member in members]
        save(build_sequential(loaded), part / "ranker")

    return stage(folder, inputs, make)


def _measured(
    recipe: Recipe, folder: Path, name: str, ranker: Path, tables: Mapping[str, Path]
) -> Iterator[tuple[str, str, EvaluationResult, OperatingPoint | None]]:
    """Yields test, system, result and cost of everything that a ranker is evaluated as."""
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
    """Yields the rows of the table: each exit alone, then all exits with each drop ratio."""
    every = list(range(len(exits)))
    if name in recipe.runs:
        for number in every[:-1]:
            yield f"{name}, exit {exits[number]}", [number], 0.0
    for drop in recipe.drop_ratios:
        yield f"{name}, drop {drop:g}", every, drop


def _report_drop_ratios(
    recipe: Recipe, folder: Path, test: str, found: Mapping[str, Mapping[int, EvaluationResult]]
) -> None:
    """Compares each cascade with itself without dropping, if that is among the drop ratios."""
    for name in [*filter(recipe.is_cascade, recipe.runs), *recipe.sequential_rankers]:
        own = {system: seeds for system, seeds in found.items() if system.startswith(f"{name}, ")}
        if f"{name}, drop 0" in own:
            made = build_report(f"{name} on {test}", own, baseline=f"{name}, drop 0")
            save_report(made, folder / f"{test}-{name}.md")
            log.info("\n%s", to_markdown(made))


def _write_costs(folder: Path, test: str, points: Mapping[str, list[OperatingPoint]]) -> None:
    """Writes cost and quality, means over the seeds (last column of Table 3)."""
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


def _write_times(recipe: Recipe, folder: Path, tables: Mapping[str, Path]) -> None:
    """Writes counted and measured savings of the rankers of each first seed."""
    rows = table(tables[recipe.tests[0]])[:TIMED_PAIRS]
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
    """Runs the command line."""
    command(Recipe, run, searches=True)


if __name__ == "__main__":
    main()
