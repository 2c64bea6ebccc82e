"""`as2ray calibrate`: scores that are probabilities."""

from typing import Any

import pyarrow as pa

from as2ray.cli.console import create_console, create_console_table, load_table
from as2ray.evaluation import plots
from as2ray.evaluation.measures import evaluated_rows
from as2ray.evaluation.reliability import Reliability, measure_reliability
from as2ray.models.calibration import CalibrationMethod, check_min_precision
from as2ray.tables.filters import QuestionFilter


def calibrate(
    model: str,
    output: str,
    method: CalibrationMethod = "temperature",
    table: str | None = None,
    corpus: str | None = None,
    split: str = "dev",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    question_filter: QuestionFilter = "raw",
    min_precision: float = 0.5,
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
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import check_new_path, save

    folder = check_new_path(output)
    check_min_precision(min_precision)
    rows = load_table(table, corpus, split, data_dir, corpus_options)
    rows = rows.filter(pa.array(evaluated_rows(rows, question_filter)))
    ranker = load(model)
    ranker.calibrate(rows, method, min_precision)
    save(ranker, folder)
    texts, label = (rows["question"].to_pylist(), rows["candidate"].to_pylist()), rows["label"]
    shown = create_console_table("stage", "ECE before", "after", "Brier before", "after")
    drawn: dict[str, Reliability] = {}
    stages = zip(ranker.exit_layers or ("",), ranker.predict_exits(*texts).T, ranker.calibration)
    for name, scores, calibration in stages:
        before, after = (
            measure_reliability(values, label.to_numpy())
            for values in (scores, calibration(scores))
        )
        numbers = (before.ece, after.ece, before.brier, after.brier)
        shown.add_row(str(name), *(f"{number:.4f}" for number in numbers))
        drawn |= {f"{name} before".strip(): before, f"{name} after".strip(): after}
    plots.reliability_diagram(drawn, model, folder / "reliability.png")
    create_console().print(shown)
    create_console().print(f"abstains below {ranker.threshold:.4f}")
