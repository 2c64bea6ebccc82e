"""`as2ray calibrate`: turns the scores of a ranker into probabilities."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field

from as2ray.cli.console import (
    create_console,
    create_console_table,
    explain_missing_scoring,
    load_table,
)
from as2ray.errors import ConfigError
from as2ray.tables.filters import QuestionFilter

if TYPE_CHECKING:
    from as2ray.tables.reliability import Reliability


def calibrate(  # noqa: PLR0913 - every argument is a flag
    *,
    model: str,
    output: str,
    method: Literal["temperature", "isotonic"] = "temperature",
    table: str | None = None,
    columns: dict[str, str] = {},  # noqa: B006
    min_positive_grade: float | None = None,
    corpus: str | None = None,
    split: str = "dev",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    question_filter: QuestionFilter = "raw",
    min_precision: Annotated[float, Field(gt=0, le=1)] = 0.5,
    high_confidence: bool = False,
    index: str | None = None,
) -> None:
    """Turns the scores of a ranker into probabilities, fitted on a development split.

    The errors that it prints are those on questions that are held out, in five folds.

    Args:
        model: Checkpoint folder or hub id.
        output: New folder for the calibrated ranker, with plots of reliability and risk.
        method: One temperature, or an isotonic map.
        table: Folder of a prepared table, or a file such as those of `as2ray train`.
        columns: Names of the table's columns, such as {"question": "q", "label": "y"}.
        min_positive_grade: Lowest grade of the table that counts as an answer; by default labels
            are 0 and 1.
        corpus: Name of a corpus instead of a table.
        split: Split of the corpus.
        data_dir: Folder of the raw release, or `hub`.
        corpus_options: Options of the corpus.
        question_filter: Questions to fit on. With `raw`, as in use, some have no answer.
        min_precision: Minimum share of correct answers among those that `as2ray ask` gives. It
            abstains below the lowest score that reaches this share on the table.
        high_confidence: Whether new questions reach it with a probability of 90 %, for which far
            fewer get an answer.
        index: Index with embeddings. Also prints which share of the table's questions, and of 100
            of general knowledge, its documents are about.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import check_new_path, save
    from as2ray.evaluation import plots
    from as2ray.evaluation.measures import evaluated_rows
    from as2ray.models.calibration import UNCHANGED

    folder = check_new_path(output)
    rows = load_table(table, corpus, split, data_dir, corpus_options, columns, min_positive_grade)
    rows = rows.filter(pa.array(evaluated_rows(rows, question_filter)))
    subject = None if index is None else _describe_subject(index, rows)
    ranker = load(model)
    result = ranker.calibrate(rows, method, min_precision, high_confidence=high_confidence)
    save(ranker, folder)
    headings = ("exit", "ECE before", "after", "Brier before", "after", "stored")
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
    if subject is not None:
        console.print(subject)
    if (missing_scoring := explain_missing_scoring(model, output)) is not None:
        console.print(missing_scoring)
    at_half, at_full = (1 - abstention.precision_at(share) for share in (0.5, 1.0))
    console.print(
        f"the first answer is wrong for {at_full:.1%} of the questions, and for {at_half:.1%} of "
        f"the half with the highest scores (AURC {abstention.aurc:.4f})"
    )
    if (few := result.explain_few()) is not None:
        console.print(few)
    if ranker.threshold is None:
        console.print(
            f"no threshold reaches a precision of {min_precision:g}; the highest one that can be "
            f"reached is {abstention.reachable_precision:.4f}. No threshold is stored."
        )
    else:
        console.print(f"abstains below {ranker.threshold:.4f}")


def _describe_subject(index_folder: str, rows: pa.Table) -> str:
    """Returns which shares of a table's and of other questions an index's documents are about.

    The bound is that of the index: the output has no `answer_scoring.json`.
    """
    from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
    from as2ray.retrieval.sentence_index import MIN_SIMILARITY, SentenceIndex
    from as2ray.retrieval.subject_bound import OFF_TOPIC_TEST_QUESTIONS, share_on_subject

    index = SentenceIndex.open(index_folder, load_sentence_encoder)
    bound = index.manifest.get(MIN_SIMILARITY)
    if bound is None:
        raise ConfigError(
            f"{index_folder} has no similarity below which questions are on other subjects",
            fix="index the documents with `as2ray index` and an encoder, or leave out --index",
        )
    questions = list(dict.fromkeys(rows["question"].to_pylist()))
    others = OFF_TOPIC_TEST_QUESTIONS.read_text(encoding="utf-8").splitlines()
    own_share, other_share = (
        share_on_subject(index, group, bound) for group in (questions, others)
    )
    return (
        f"subject: {own_share:.1%} of the table's questions, and {other_share:.1%} of "
        f"{len(others)} of general knowledge, have a sentence with a similarity of {bound:.4f}"
    )
