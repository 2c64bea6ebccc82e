"""`as2ray calibrate`: turns the scores of a ranker into probabilities."""

from typing import Annotated, Any

import pyarrow as pa
from pydantic import Field

from as2ray.cli.console import create_console, create_console_table, load_table
from as2ray.evaluation import plots
from as2ray.evaluation.measures import evaluated_rows
from as2ray.evaluation.reliability import Reliability, measure_reliability
from as2ray.models.calibration import CalibrationMethod
from as2ray.tables.filters import QuestionFilter


def calibrate(
    *,
    model: str,
    output: str,
    method: CalibrationMethod = "temperature",
    table: str | None = None,
    corpus: str | None = None,
    split: str = "dev",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    question_filter: QuestionFilter = "raw",
    min_precision: Annotated[float, Field(gt=0, le=1)] = 0.5,
) -> None:
    """Turns the scores of a ranker into probabilities, fitted on a development split.

    Args:
        model: Checkpoint folder or hub id.
        output: New folder for the calibrated ranker, with a reliability plot.
        method: One temperature, or an isotonic map.
        table: Folder of a prepared table.
        corpus: Name of a corpus instead of a table.
        split: Split of the corpus.
        data_dir: Folder of the raw release, or `hub`.
        corpus_options: Options of the corpus.
        question_filter: Questions to fit on. With `raw`, as in use, some have no answer.
        min_precision: Minimum share of correct answers among those that `as2ray ask` gives. It
            abstains below the score that reaches this share.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import check_new_path, save

    folder = check_new_path(output)
    rows = load_table(table, corpus, split, data_dir, corpus_options)
    rows = rows.filter(pa.array(evaluated_rows(rows, question_filter)))
    ranker = load(model)
    ranker.calibrate(rows, method, min_precision)
    save(ranker, folder)
    texts, labels = (rows["question"].to_pylist(), rows["candidate"].to_pylist()), rows["label"]
    summary = create_console_table("stage", "ECE before", "after", "Brier before", "after")
    curves: dict[str, Reliability] = {}
    stages = zip(ranker.exit_layers or ("",), ranker.predict_exits(*texts).T, ranker.calibration)
    for name, scores, calibration in stages:
        before, after = (
            measure_reliability(values, labels.to_numpy())
            for values in (scores, calibration(scores))
        )
        numbers = (before.ece, after.ece, before.brier, after.brier)
        summary.add_row(str(name), *(f"{number:.4f}" for number in numbers))
        curves |= {f"{name} before".strip(): before, f"{name} after".strip(): after}
    plots.reliability_diagram(curves, model, folder / "reliability.png")
    create_console().print(summary)
    create_console().print(f"abstains below {ranker.threshold:.4f}")
