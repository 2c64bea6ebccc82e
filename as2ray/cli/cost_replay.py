"""Replays stored scores of all exits for `as2ray cost`."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.margins import Margins
from as2ray.cascade.pruning import Pruning, Rounding, StagedScores, expand_drop_ratios
from as2ray.cli.console import create_console, create_console_table
from as2ray.distributed.score import RANKER_FACTS, read_scores, score_table
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.cascade_replay import CascadeReplay
from as2ray.evaluation.pruning_report import PruningReport, explain_question, report_pruning
from as2ray.tables.atomic import atomic_file
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.parquet import write_part
from as2ray.tables.source_files import hash_files
from as2ray.text.bm25 import POINTS_PER_LOGIT

MAX_SHOWN_CHARS = 80
"""Characters of a candidate that are shown."""

INPUTS: Final = "inputs.json"
"""File beside stored scores: the fingerprints of the texts and of the model that were scored."""

STAGE_MANIFEST: Final = "manifest.json"
"""File in the folder of a pipeline's stage, which has no `INPUTS`: its rows are only counted."""

DROPPING_SETTINGS: Final = (
    "bm25_margin",
    "bm25_weights",
    "calibration",
    "drop_ratios",
    "margins",
    "plain_calibration",
    "rounding",
    "threshold",
)
"""Settings of a checkpoint that change no score of an exit."""


@dataclass(frozen=True)
class Ways:
    """Ways of dropping candidates that are replayed."""

    exit_layers: Sequence[int] | None
    """Layers below the exits that are used; by default all that are stored."""
    drop_ratios: float | list[float] | None
    margins: list[float] | None
    top_k: int
    budget_ms: float | None
    layer_us: float


def print_replay(
    folder: str,
    rows: pa.Table,
    model: str | None,
    ways: Ways,
    rounding: Rounding,
    question_id: str | None,
) -> None:
    """Prints what each way of dropping saves and loses, and where a question's candidates left.

    Args:
        folder: Folder of the scores; those that are missing are computed and stored there.
        rows: The table that was scored.
        model: Checkpoint whose scores and margins are taken.
        ways: What is replayed.
        rounding: How drop ratios are rounded.
        question_id: A question to explain.

    Raises:
        ConfigError: There are no scores and no model, the scores are of another table or model, or
            of no cascade, exits or margins do not fit them, or there is no such question.
    """
    _complete_scores(Path(folder), rows, model)
    settings = _read_settings(model)
    replay = _load_replay(folder, rows, settings.get("rounding", rounding))
    stored = Margins.from_settings(settings["margins"]) if settings.get("margins") else None
    is_open = ways.drop_ratios is None and ways.exit_layers is None and not ways.margins
    if is_open and stored is None and any(ratios := settings.get("drop_ratios", ())):
        ways = replace(ways, drop_ratios=ratios)
    bm25_margin, weights = settings.get("bm25_margin"), settings.get("bm25_weights") or []
    as_ranked = replay
    if stored is not None and (bm25_margin is not None or any(weights)) and not ways.margins:
        as_ranked = replay.with_bm25(dict(zip(replay.exit_layers, weights)))
        if bm25_margin is None:  # It has a part in the scores only.
            as_ranked = replace(
                as_ranked, exit_layers=replay.exit_layers, scores=as_ranked.scores[:, 1:]
            )
        else:  # The first stage is BM25's, which has no layer.
            stored = replace(stored, values=(bm25_margin, *stored.values))
    replayed = list(_replay_ways(replay, as_ranked, ways, stored))
    reports = [report_pruning(*each) for each in replayed]
    console = create_console()
    console.print(_summarize(as_ranked.exit_layers, reports))
    if stored is not None and stored.bound is not None:
        console.print(str(stored.bound))
    if question_id is None:
        return
    ids = rows["question_id"].to_pylist()
    if question_id not in ids:
        raise ConfigError(
            f"question_id={question_id!r} is not in the table; the first is {ids[0]!r}"
        )
    question = int(replay.question_index[ids.index(question_id)])
    console.print(rows["question"][ids.index(question_id)].as_py())
    for each_replay, name, exits, staged in replayed[1:]:
        candidates = create_console_table(name, "left after layer", "score", "below the best")
        for each in explain_question(each_replay, exits, staged, question):
            candidates.add_row(
                ("* " if each.label else "  ") + each.candidate[:MAX_SHOWN_CHARS],
                str(each.exit_layer),
                f"{each.score:.4f}",
                f"{each.gap:.2f}",
            )
        console.print(candidates)


def _complete_scores(folder: Path, rows: pa.Table, model: str | None) -> None:
    """Checks that stored scores are of these rows and this model; computes those that are missing.

    Raises:
        ConfigError: They are not, or some are missing and there is no model, or one of few exits.
    """
    if (folder / STAGE_MANIFEST).is_file():
        return
    inputs = {"table": fingerprint(rows.select(["question", "candidate"]))}
    if model is not None:
        inputs["model"] = _fingerprint_model(Path(model))
    if not any(folder.glob("[!.]*")):
        if model is None:
            raise ConfigError(
                f"scores={folder} does not exist",
                fix="name a cascade, whose scores are then stored there: --model DIR",
            )
        exits = _read_settings(model).get("exit_layers", ())
        if len(exits) < 2:
            raise ConfigError(
                f"model={model} has {len(exits)} exits, and drops no candidates between them",
                fix="use a cascade of several exits or a sequential ranker",
            )
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / INPUTS) as file:
            file.write_text(json.dumps(inputs), encoding="utf-8")
    elif not (folder / INPUTS).is_file():
        raise ConfigError(
            f"scores={folder} has no {INPUTS}, which names the table and the model",
            fix="name another folder, in which the scores are then stored",
        )
    stored = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    for name, value in inputs.items():
        if stored[name] != value:
            raise ConfigError(
                f"scores={folder} has the scores of another {name}",
                fix=f"name the {name} that was scored, as it was, or another folder for the scores",
            )
    num_scored = sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))
    if num_scored == len(rows):
        return
    if model is None:
        raise ConfigError(
            f"scores={folder} has {num_scored:,} of {len(rows):,} rows: scoring was interrupted",
            fix="name the model, which scores the others: --model DIR",
        )
    with TemporaryDirectory() as tables:
        write_part(rows, Path(tables) / "part-0.parquet")
        score_table(tables, model, folder, WorkersConfig(num_workers=0), "exits")


def _fingerprint_model(folder: Path) -> str:
    """Returns a hash of what determines the scores of a checkpoint: weights, tokens, settings.

    Raises:
        ConfigError: The folder is no checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model={folder} is no folder of a checkpoint")
    settings = _read_settings(str(folder))
    kept = {name: value for name, value in settings.items() if name not in DROPPING_SETTINGS}
    files = [*folder.glob("*.safetensors"), folder / "tokenizer.json"]
    content = json.dumps([kept, hash_files(files)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _load_replay(folder: str, rows: pa.Table, rounding: Rounding) -> CascadeReplay:
    stored = read_scores(folder)
    exits = [name for name in stored.column_names if name.isdigit()]
    metadata = pq.read_schema(min(Path(folder).glob("*.parquet"))).metadata or {}
    if len(exits) < 2 or RANKER_FACTS not in metadata:
        raise ConfigError(f"scores={folder} has scores of the exits {exits}; a cascade has several")
    if len(stored) != len(rows):
        raise ConfigError(
            f"scores={folder} has {len(stored):,} rows and the table {len(rows):,}",
            fix="name the table that was scored, with the same filter",
        )
    facts = json.loads(metadata[RANKER_FACTS])
    return CascadeReplay(
        rows,
        tuple(map(int, exits)),
        np.stack([stored[name].to_numpy() for name in exits], 1),
        stored["tokens"].to_numpy(),
        EncoderShape(**facts["shape"]),
        facts["sequential"],
        rounding,
    )


def _read_settings(model: str | None) -> dict[str, Any]:
    path = Path(model or "") / "config.json"
    if model is None or not path.exists():
        return {}
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("as2ray", {})
    return settings


def _replay_ways(
    replay: CascadeReplay, as_ranked: CascadeReplay, ways: Ways, stored: Margins | None
) -> Iterator[tuple[CascadeReplay, str, list[int], StagedScores]]:
    """Yields the replay, the name, the indices of the exits and the scores of each way.

    The first way drops nothing.

    Args:
        replay: The stored scores. BM25 has no part where ratios replace the model's margins.
        as_ranked: The scores as the model ranks, with BM25's part in them; BM25 may be a stage.
        ways: The ways.
        stored: The margins of the stages of `as_ranked` but the last.
    """
    layers = list(ways.exit_layers or replay.exit_layers)
    if not {*layers} <= {*replay.exit_layers} or sorted({*layers}) != layers:
        raise ConfigError(
            f"exit_layers={layers} must be some of the stored exits {list(replay.exit_layers)}"
        )
    exits = [replay.exit_layers.index(layer) for layer in layers]
    ranked_exits = [as_ranked.exit_layers.index(layer) for layer in layers]
    yield replay, "nothing dropped", exits[-1:], replay.rank(exits[-1:], 0.0)
    margins = Margins(tuple(ways.margins), ways.top_k) if ways.margins else stored
    pruning = None
    with_bm25 = as_ranked.exit_layers[0] == 0
    stages = [0, *ranked_exits] if with_bm25 else ranked_exits
    if margins is not None:
        margins.check_stages(len(stages))
        parts = []
        if with_bm25:
            parts.append(f"BM25 {margins.values[0] * float(POINTS_PER_LOGIT):.1f}")
        if values := [f"{value:.2f}" for value in margins.values[len(parts) :]]:
            parts.append("margins " + ", ".join(values))
        limits = np.array([margins.values])
        pruning = Pruning(np.zeros_like(limits), limits, margins.top_k)
        staged = as_ranked.rank_by_margins(stages, margins.values, margins.top_k)
        yield as_ranked, ", ".join(parts), stages, staged
    if ways.drop_ratios is not None or (margins is None and ways.budget_ms is None):
        ratios = 0.3 if ways.drop_ratios is None else ways.drop_ratios
        name = "ratio " + ", ".join(f"{ratio:g}" for ratio in np.atleast_1d(ratios))
        pruning = pruning or Pruning.by_rank(
            expand_drop_ratios(ratios, len(exits), 1), replay.rounding
        )
        yield replay, name, exits, replay.rank(exits, ratios)
    if ways.budget_ms is not None:
        name = f"{ways.budget_ms:g} ms, {ways.layer_us:g} us a layer"
        seconds = ways.budget_ms / 1e3, ways.layer_us / 1e6
        yield as_ranked, name, stages, as_ranked.rank_within(stages, *seconds, pruning)


def _summarize(layers: Sequence[int], reports: Sequence[PruningReport]) -> Any:
    """Returns a table with a row for each way, and a column for each of the layers."""
    columns = [f"left at {layer}" for layer in layers]
    table = create_console_table("dropping", *columns, "operations", "1 - 1/place", "MAP")
    for report in reports:
        shares = dict(zip(report.exit_layers, report.left_shares))
        table.add_row(
            report.name,
            *(f"{shares[layer]:.1%}" if layer in shares else "" for layer in layers),
            f"{report.relative_flops:.1%}",
            f"{report.first_place_loss:.4f}",
            "" if report.map is None else f"{report.map:.4f}",
        )
    return table
