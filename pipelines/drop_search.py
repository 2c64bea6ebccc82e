"""Stages of a search for drop ratios: stored scores of all exits, and the chosen ratios."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass

from as2ray.cascade.cost import EncoderShape
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.tune import run_grid, run_search
from as2ray.evaluation import plots
from as2ray.evaluation.cascade_replay import (
    CascadeReplay,
    OperatingPoint,
    cheapest_point,
    pareto_front,
)
from as2ray.experiments.stage import digest, manifest, stage
from as2ray.models.cascade import CascadeRanker
from as2ray.models.multi_stage import MultiStageRanker
from as2ray.models.sequential import SequentialRanker
from as2ray.tables.filters import QuestionFilter, filter_mask
from pipelines.steps import table
from pipelines.trials import dropped, dropped_first
from tune_spaces import drop_ratios


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Search:
    """How drop ratios and exits are chosen on the dev table."""

    max_map_loss: NonNegativeFloat = 0.005
    """MAP that the chosen point may lose compared with dropping nothing."""
    num_trials: NonNegativeInt = 100
    """Trials of Optuna, in addition to the paper's grid."""
    seed: NonNegativeInt = 0
    """Seed of Optuna's sampler."""


def replays(
    folder: Path, ranker: Path, tables: Mapping[str, Path], question_filter: QuestionFilter
) -> dict[str, CascadeReplay]:
    """Stores the scores of all exits over each table, and returns their replays.

    Args:
        folder: Folder of the pipeline's stages.
        ranker: Stage of a cascade or a sequential ranker.
        tables: Stages of tables by name.
        question_filter: Questions to evaluate.
    """
    inputs = {
        "ranker": digest(ranker),
        "tables": {name: digest(path) for name, path in tables.items()},
        "question_filter": question_filter,
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

    made = stage(folder / "scores" / ranker.name, inputs, make)
    outputs = manifest(made)["outputs"]
    return {
        name: _replay(
            _filtered(path, question_filter), pq.read_table(made / f"{name}.parquet"), outputs
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
    folder: Path, ranker: Path, replay: CascadeReplay, search: Search
) -> tuple[Path, OperatingPoint]:
    """Makes a stage with the cascade of the chosen exits and drop ratios.

    Args:
        folder: Folder of the pipeline's stages.
        ranker: Stage of the cascade.
        replay: Its scores on the dev table.
        search: Settings of the search.

    Returns:
        The stage, and the chosen point.
    """
    exits = len(replay.exit_layers)
    scores = folder / "scores" / ranker.name
    inputs = {"ranker": digest(ranker), "search": search, "scores": digest(scores)}

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
                search.num_trials,
                search.seed,
            )
        gridded = [OperatingPoint(**point) for point in found]
        sampled = [replay.evaluate(*drop_ratios.apply_params(config, exits)) for config, _ in tried]
        whole = replay.evaluate(list(range(exits)), 0.0)
        everything = [*gridded, *sampled, whole]
        chosen = cheapest_point(everything, whole.map - search.max_map_loss)
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

    made = stage(folder / "searched" / ranker.name, inputs, make)
    chosen = manifest(made)["outputs"]["chosen"]
    return made, OperatingPoint(**chosen)


def _draw(
    folder: Path,
    points: Mapping[str, list[OperatingPoint]],
    front: list[OperatingPoint],
    chosen: OperatingPoint,
    title: str,
) -> None:
    """Writes the Pareto front as a table, and plots every point (Figure 2)."""
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
