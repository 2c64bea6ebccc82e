"""Per-question values of several runs, brought to one order and summed up over seeds.

Knows tables of per-question values (`Evaluation.per_question`). Must not know models or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import EvaluationError

QuestionValues = npt.NDArray[np.float64]
"""One value a question, shape [questions]."""


@dataclass(frozen=True)
class SeedSummary:
    """A measure over several seeds."""

    mean: float
    """Mean over seeds."""
    std: float | None
    """Sample standard deviation over seeds; None for one seed."""
    num_seeds: int
    """Number of seeds."""


def average_over_seeds(per_question: Sequence[pa.Table]) -> pa.Table:
    """Each question's mean over several seeds' tables: seeds are no independent questions.

    Raises:
        EvaluationError: No table, or tables of other questions or measures.
    """
    names = [n for n in _first_table(per_question).column_names if n != "question_id"]
    ids = per_question[0]["question_id"].sort()
    columns = {n: np.mean(align_by_question(per_question, n), axis=0) for n in names}
    return pa.table({"question_id": ids, **columns})


def summarize_seeds(per_question: Sequence[pa.Table], measure: str) -> SeedSummary:
    """Mean and standard deviation of a measure over several seeds' tables."""
    _first_table(per_question)
    means = np.mean(align_by_question(per_question, measure), axis=1)
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    return SeedSummary(float(means.mean()), std, len(means))


def align_by_question(tables: Sequence[pa.Table], measure: str) -> list[QuestionValues]:
    """The measure of each table, shape [questions], in the one order of sorted question ids.

    Raises:
        EvaluationError: No such measure, or tables of other questions.
    """
    values, reference = [], None
    for table in tables:
        if measure not in table.column_names:
            raise EvaluationError(
                f"no measure {measure!r} among {table.column_names}"
                "; expected a column of that name in every table",
                fix="evaluate all systems with the same measures",
            )
        ordered = table.sort_by("question_id")
        reference = reference or ordered["question_id"].to_pylist()
        _check_same_questions(reference, ordered["question_id"].to_pylist())
        values.append(ordered[measure].to_numpy().astype(np.float64))
    return values


def _check_same_questions(reference: list[str], ids: list[str]) -> None:
    if ids != reference or len(set(ids)) < len(ids):
        missing, other = set(reference) - set(ids), set(ids) - set(reference)
        raise EvaluationError(
            f"{len(reference):,} and {len(ids):,} questions ({len(set(ids)):,} distinct): "
            f"{len(missing):,} missing {sorted(missing)[:3]}, {len(other):,} other "
            f"{sorted(other)[:3]}"
            "; expected the same questions in all tables, each once",
            fix="evaluate all on the same table under the same filter",
        )


def _first_table(tables: Sequence[pa.Table]) -> pa.Table:
    if not tables:
        raise EvaluationError(
            "no table of per-question values; expected at least one seed",
            fix="evaluate the system before it is compared",
        )
    return tables[0]
