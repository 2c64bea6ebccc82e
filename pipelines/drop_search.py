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

from as2ray.cascade.cost import EncoderShape
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.tune import run_grid, run_search
from as2ray.errors import ConfigError
from as2ray.evaluation import plots
from as2ray.evaluation.cascade_replay import (
    CascadeReplay,
    OperatingPoint,
    cheapest_point,
    pareto_front,
)
from as2ray.experiments.stage import digest, stage
from as2ray.models.cascade import CascadeRanker
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.sequential import SequentialRanker
from as2ray.tables.filters import QuestionFilter, filter_mask
from pipelines.steps import table
from pipelines.trials import dropped, dropped_first
from tune_spaces import drop_ratios


@dataclass(frozen=True)
class Search:
    """How drop ratios and exits are chosen, on the dev table."""

    max_map_loss: float = 0.005
    """MAP that the chosen point may lose against dropping nothing."""
    num_trials: int = 100
    """Of Optuna's search, beside the paper's grid."""
    seed: int = 0
    """Of its sampler."""

    def __post_init__(self) -> None:
        if self.max_map_loss < 0 or self.num_trials < 0 or self.seed < 0:
            raise ConfigError(
                f"search with {self}; expected no number below 0",
            )


def replays(
    folder: Path, ranker: Path, tables: Mapping[str, Path], question_filter: QuestionFilter
) -> dict[str, CascadeReplay]:
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
        "filter": question_filter,
    }

    def make(part: Path) -> dict[str, Any]:
        loaded = load(ranker / "ranker")
        assert isinstance(loaded, MultiStageRanker)
        for name, path in tables.items():
            rows = _filtered(path, question_filter)
            texts = (rows["question"].to_pylist(), rows["candidate"].to_pylist())
            scores = {str(e): s for e, s in zip(loaded.exit_layers, loaded.predict_exits(*texts).T)}
            tokens = {"tokens": loaded.tokenizer.encode(*texts).lengths}
            pq.write_table(pa.table({**tokens, **scores}), part / f"{name}.parquet")
        shape = asdict(EncoderShape.from_config(loaded.network.config))
        return {"shape": shape, "sequential": isinstance(loaded, SequentialRanker)}

    made = stage(folder / "scores" / ranker.name, identity, make)
    found = json.loads((made / "manifest.json").read_text())["found"]
    return {
        name: _replay(
            _filtered(path, question_filter), pq.read_table(made / f"{name}.parquet"), found
        )
        for name, path in tables.items()
    }


def _replay(rows: pa.Table, stored: pa.Table, found: Mapping[str, Any]) -> CascadeReplay:
    exits = [name for name in stored.column_names if name != "tokens"]
    return CascadeReplay(
        rows,
        tuple(map(int, exits)),
        np.stack([stored[name].to_numpy() for name in exits], 1),
        stored["tokens"].to_numpy(),
        EncoderShape(**found["shape"]),
        found["sequential"],
    )


def _filtered(path: Path, question_filter: QuestionFilter) -> pa.Table:
    rows = table(path)
    return rows.filter(pa.array(filter_mask(rows, question_filter)))


def search_drop_ratios(
    folder: Path, ranker: Path, replay: CascadeReplay, how: Search
) -> tuple[Path, OperatingPoint]:
    """A stage with the cascade of the chosen exits and drop ratios, and the choice itself.

    Args:
        folder: Of the pipeline's stages.
        ranker: Stage of the cascade.
        replay: Its scores on the dev table.
        how: What to search.
    """
    exits = len(replay.exit_layers)
    scores = folder / "scores" / ranker.name
    identity = {"ranker": digest(ranker), "search": how, "scores": digest(scores)}

    def make(part: Path) -> dict[str, Any]:
        with ray_session():
            firsts = drop_ratios.RATIOS if exits > 1 else ()
            found = run_grid(dropped_first, firsts, replay, part.resolve() / "grid")
            tried = run_search(
                dropped,
                partial(drop_ratios.suggest, num_exits=exits),
                {"quality": "max", "cost": "min"},
                replay,
                part.resolve() / "optuna",
                how.num_trials,
                how.seed,
            )
        gridded = [OperatingPoint.from_dict(point) for point in found]
        sampled = [replay.evaluate(*drop_ratios.apply_params(config, exits)) for config, _ in tried]
        whole = replay.evaluate(list(range(exits)), 0.0)
        everything = [*gridded, *sampled, whole]
        chosen = cheapest_point(everything, whole.map - how.max_map_loss)
        _draw(
            part,
            {"grid": gridded, "Optuna": sampled},
            pareto_front(everything),
            chosen,
            ranker.name,
        )
        cascade = load(ranker / "ranker", device="cpu")
        assert isinstance(cascade, CascadeRanker)
        cascade.prune_exits(chosen.exit_layers)
        cascade.drop_ratios = chosen.drop_ratios
        save(cascade, part / "ranker")
        return {"chosen": chosen, "undropped": whole}

    made = stage(folder / "searched" / ranker.name, identity, make)
    chosen = json.loads((made / "manifest.json").read_text())["found"]["chosen"]
    return made, OperatingPoint.from_dict(chosen)


def _draw(
    folder: Path,
    points: Mapping[str, list[OperatingPoint]],
    front: list[OperatingPoint],
    chosen: OperatingPoint,
    title: str,
) -> None:
    """The front as a table, and every point in a plot (Figure 2)."""
    lines = ["| exits | drop ratios | dev MAP | operations | |", "|---|---|---|---|---|"]
    for point in front:
        drop = ", ".join(f"{ratio:.2f}" for ratio in point.drop_ratios)
        mark = "chosen" if point == chosen else ""
        lines.append(
            f"| {', '.join(map(str, point.exit_layers))} | {drop} | {point.map:.4f} "
            f"| {100 * point.relative_flops:.1f} % | {mark} |"
        )
    (folder / "pareto.md").write_text("\n".join(lines) + "\n")
    plots.pareto_plot(
        {name: [(100 * p.relative_flops, p.map) for p in of] for name, of in points.items() if of},
        [(100 * p.relative_flops, p.map) for p in front],
        title,
        "operations, % of the whole encoder's",
        "MAP (dev)",
        folder / "pareto.png",
    )
