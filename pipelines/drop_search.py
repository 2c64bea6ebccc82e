"""Stages of a search for drop ratios: stored scores of all exits, and what was chosen from them.

Knows stages, replays and the search space. Must not know how the cascade was trained.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray import checkpoint
from as2ray.distributed.cluster import connected
from as2ray.distributed.tune import grid, search
from as2ray.errors import RecipeError
from as2ray.evaluation import plots
from as2ray.evaluation.cost import Shape
from as2ray.evaluation.simulation import Point, Replay, cheapest, pareto
from as2ray.filters import Filter, filter_mask
from as2ray.models.cascade import CascadeRanker
from as2ray.models.sequential import SequentialRanker
from as2ray.models.staged import StagedRanker
from as2ray.stages import digest, stage
from pipelines.steps import table
from pipelines.trials import dropped, dropped_first
from tune_spaces import drop_ratios


@dataclass(frozen=True)
class Search:
    """How drop ratios and exits are chosen, on the dev table."""

    tolerance: float = 0.005
    """MAP that the chosen point may lose against dropping nothing."""
    trials: int = 100
    """Of Optuna's search, beside the paper's grid."""
    seed: int = 0
    """Of its sampler."""

    def __post_init__(self) -> None:
        if self.tolerance < 0 or self.trials < 0 or self.seed < 0:
            raise RecipeError(
                f"search with {self}", expected="no number below 0", mend="correct the recipe"
            )


def replays(
    folder: Path, ranker: Path, tables: Mapping[str, Path], filter: Filter
) -> dict[str, Replay]:
    """Stored scores of all exits over each table, taken once.

    Args:
        folder: Of the pipeline's stages.
        ranker: Stage of a cascade or a sequential ranker.
        tables: Stages of tables by name.
        filter: Questions that count.
    """
    identity = {
        "ranker": digest(ranker),
        "tables": {name: digest(path) for name, path in tables.items()},
        "filter": filter,
    }

    def make(part: Path) -> dict[str, Any]:
        loaded = checkpoint.load(ranker / "ranker")
        assert isinstance(loaded, StagedRanker)
        for name, path in tables.items():
            rows = _filtered(path, filter)
            texts = (rows["question"].to_pylist(), rows["candidate"].to_pylist())
            scores = {str(e): s for e, s in zip(loaded.exits, loaded.score_exits(*texts).T)}
            tokens = {"tokens": loaded.tokenizer.encode(*texts).lengths}
            pq.write_table(pa.table({**tokens, **scores}), part / f"{name}.parquet")
        shape = asdict(Shape.of(loaded.network.config))
        return {"shape": shape, "sequential": isinstance(loaded, SequentialRanker)}

    made = stage(folder / "scores" / ranker.name, identity, make)
    found = json.loads((made / "manifest.json").read_text())["found"]
    return {
        name: _replay(_filtered(path, filter), pq.read_table(made / f"{name}.parquet"), found)
        for name, path in tables.items()
    }


def _replay(rows: pa.Table, stored: pa.Table, found: Mapping[str, Any]) -> Replay:
    exits = [name for name in stored.column_names if name != "tokens"]
    return Replay(
        rows,
        tuple(map(int, exits)),
        np.stack([stored[name].to_numpy() for name in exits], 1),
        stored["tokens"].to_numpy(),
        Shape(**found["shape"]),
        found["sequential"],
    )


def _filtered(path: Path, filter: Filter) -> pa.Table:
    rows = table(path)
    return rows.filter(pa.array(filter_mask(rows, filter)))


def searched(folder: Path, ranker: Path, replay: Replay, how: Search) -> tuple[Path, Point]:
    """A stage with the cascade of the chosen exits and drop ratios, and the choice itself.

    Args:
        folder: Of the pipeline's stages.
        ranker: Stage of the cascade.
        replay: Its scores on the dev table.
        how: What to search.
    """
    exits = len(replay.exits)
    scores = folder / "scores" / ranker.name
    identity = {"ranker": digest(ranker), "search": how, "scores": digest(scores)}

    def make(part: Path) -> dict[str, Any]:
        with connected():
            firsts = drop_ratios.RATIOS if exits > 1 else ()
            found = grid(dropped_first, firsts, replay, part.resolve() / "grid")
            tried = search(
                dropped,
                partial(drop_ratios.suggest, exits=exits),
                {"quality": "max", "cost": "min"},
                replay,
                part.resolve() / "optuna",
                how.trials,
                how.seed,
            )
        gridded = [Point.of(point) for point in found]
        sampled = [replay.point(*drop_ratios.choice(config, exits)) for config, _ in tried]
        whole = replay.point(list(range(exits)), 0.0)
        everything = [*gridded, *sampled, whole]
        chosen = cheapest(everything, whole.quality - how.tolerance)
        _draw(part, {"grid": gridded, "Optuna": sampled}, pareto(everything), chosen, ranker.name)
        cascade = checkpoint.load(ranker / "ranker", device="cpu")
        assert isinstance(cascade, CascadeRanker)
        cascade.keep(chosen.exits)
        cascade.drop = chosen.drop
        checkpoint.save(cascade, part / "ranker")
        return {"chosen": chosen, "undropped": whole}

    made = stage(folder / "searched" / ranker.name, identity, make)
    chosen = json.loads((made / "manifest.json").read_text())["found"]["chosen"]
    return made, Point.of(chosen)


def _draw(
    folder: Path,
    points: Mapping[str, list[Point]],
    front: list[Point],
    chosen: Point,
    title: str,
) -> None:
    """The front as a table, and every point in a plot (Figure 2)."""
    lines = ["| exits | drop ratios | dev MAP | operations | |", "|---|---|---|---|---|"]
    for point in front:
        drop = ", ".join(f"{ratio:.2f}" for ratio in point.drop)
        mark = "chosen" if point == chosen else ""
        lines.append(
            f"| {', '.join(map(str, point.exits))} | {drop} | {point.quality:.4f} "
            f"| {100 * point.cost:.1f} % | {mark} |"
        )
    (folder / "pareto.md").write_text("\n".join(lines) + "\n")
    plots.scatter(
        {name: [(100 * p.cost, p.quality) for p in of] for name, of in points.items() if of},
        [(100 * p.cost, p.quality) for p in front],
        title,
        "operations, % of the whole encoder's",
        "MAP (dev)",
        folder / "pareto.png",
    )
