"""`as2ray calibrate`: turns the scores of a ranker into probabilities."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field

from as2ray.cli.console import create_console, create_console_table, load_table
from as2ray.tables.filters import QuestionFilter

if TYPE_CHECKING:
    from as2ray.tables.reliability import Reliability


def calibrate(
    *,
    model: str,
    output: str,
    method: Literal["temperature", "isotonic"] = "temperature",
    table: str | None = None,
    columns: dict[str, str] = {},  # noqa: B006
    corpus: str | None = None,
    split: str = "dev",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    question_filter: QuestionFilter = "raw",
    min_precision: Annotated[float, Field(gt=0, le=1)] = 0.5,
) -> None:
    """Turns the scores of a ranker into probabilities, fitted on a development split.

    The errors that it prints are those on questions that are held out, in five folds.

    Args:
        model: Checkpoint folder or hub id.
        output: New folder for the calibrated ranker, with plots of reliability and risk.
        method: One temperature, or an isotonic map.
        table: Folder of a prepared table, or a file such as those of `as2ray train`.
        columns: Names of the table's columns, such as {"question": "q", "label": "y"}.
        corpus: Name of a corpus instead of a table.
        split: Split of the corpus.
        data_dir: Folder of the raw release, or `hub`.
        corpus_options: Options of the corpus.
        question_filter: Questions to fit on. With `raw`, as in use, some have no answer.
        min_precision: Minimum share of correct answers among those that `as2ray ask` gives. It
            abstains below the score that reaches this share with a confidence of 90 %.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import check_new_path, save
    from as2ray.evaluation import plots
    from as2ray.evaluation.measures import evaluated_rows
    from as2ray.models.calibration import UNCHANGED

    folder = check_new_path(output)
    rows = load_table(table, corpus, split, data_dir, corpus_options, columns)
    rows = rows.filter(pa.array(evaluated_rows(rows, question_filter)))
    ranker = load(model)
    result = ranker.calibrate(rows, method, min_precision)
    save(ranker, folder)
    headings = ("stage", "ECE before", "after", "Brier before", "after", "stored")
    summary = create_console_table(*headings)
    curves: dict[str, Reliability] = {}
    stages = zip(ranker.exit_layers or ("",), result.before, result.after, ranker.calibration)
    for name, before, after, calibration in stages:
        numbers = (before.ece, after.ece, before.brier, after.brier)
        is_stored = "no" if calibration == UNCHANGED else "yes"
        summary.add_row(str(name), *(f"{number:.4f}" for number in numbers), is_stored)
        curves |= {f"{name} before".strip(): before, f"{name} after".strip(): after}
    plots.reliability_diagram(curves, model, folder / "reliability.png")
    abstention = result.abstention
    points = list(zip(abstention.coverage.tolist(), abstention.risk.tolist()))
    axes = ("share of questions answered", "share of wrong answers")
    path = folder / "risk_coverage.png"
    plots.learning_curve({"risk": points}, model, *axes, path, markers=False)
    console = create_console()
    console.print(summary)
    at_half, at_full = (1 - abstention.precision_at(share) for share in (0.5, 1.0))
    console.print(
        f"wrong first answers: {at_full:.4f}, of the half with the highest scores {at_half:.4f}; "
        f"AURC {abstention.aurc:.4f}"
    )
    if ranker.threshold is None:
        console.print(
            f"no threshold is sure to reach a precision of {min_precision:g}; the highest one that "
            f"can be reached is {abstention.reachable_precision:.4f}. No threshold is stored."
        )
    else:
        console.print(f"abstains below {ranker.threshold:.4f}")
