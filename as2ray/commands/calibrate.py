"""`as2ray calibrate`: scores that are probabilities."""

from typing import Any

import pyarrow as pa

from as2ray.calibration import Kind, Reliability, check_precision, reliability
from as2ray.commands.shown import console, rows_of, table_of
from as2ray.evaluation import plots
from as2ray.evaluation.measures import kept_of
from as2ray.filters import Filter


def calibrate(
    model: str,
    output: str,
    kind: Kind = "temperature",
    table: str | None = None,
    corpus: str | None = None,
    split: str = "dev",
    source: str | None = None,
    options: dict[str, Any] = {},  # noqa: B006
    filter: Filter = "raw",
    precision: float = 0.5,
) -> None:
    """Makes a ranker's scores probabilities, fitted on a development split.

    Args:
        model: Checkpoint folder or hub id.
        output: A new folder, where the calibrated ranker goes, with a reliability plot.
        kind: One temperature, or an isotonic map.
        table: Folder of a prepared table.
        corpus: Name of a corpus in place of a table.
        split: Split of the corpus.
        source: Folder of the raw release, or `hub`.
        options: The corpus' own options.
        filter: Questions that count; raw, for a user meets questions without an answer too.
        precision: Share of right ones among the answers that `as2ray ask` gives, at least; it
            abstains below the score that this takes.
    """
    from as2ray.checkpoint import load, new_folder, save

    folder = new_folder(output)
    check_precision(precision)
    rows = rows_of(table, corpus, split, source, options)
    rows = rows.filter(pa.array(kept_of(rows, filter)))
    ranker = load(model)
    ranker.calibrate(rows, kind, precision)
    save(ranker, folder)
    texts, label = (rows["question"].to_pylist(), rows["candidate"].to_pylist()), rows["label"]
    shown = table_of("stage", "ECE before", "after", "Brier before", "after")
    drawn: dict[str, Reliability] = {}
    stages = zip(ranker.exits or ("",), ranker.score_exits(*texts).T, ranker.calibration)
    for name, scores, calibration in stages:
        before, after = (
            reliability(values, label.to_numpy()) for values in (scores, calibration(scores))
        )
        numbers = (before.ece, after.ece, before.brier, after.brier)
        shown.add_row(str(name), *(f"{number:.4f}" for number in numbers))
        drawn |= {f"{name} before".strip(): before, f"{name} after".strip(): after}
    plots.reliability_diagram(drawn, model, folder / "reliability.png")
    console().print(shown)
    console().print(f"abstains below {ranker.threshold:.4f}")
