"""Aligns per-question values of several runs and averages them over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import EvaluationError

QuestionValues = npt.NDArray[np.float64]
"""One value per question, shape [questions]."""


@dataclass(frozen=True)
class SeedSummary:
    """Mean and deviation of a measure over several seeds."""

    mean: float
    """Mean over seeds."""
    std: float | None
    """Sample standard deviation over seeds; None for one seed."""
    num_seeds: int
    """Number of seeds."""


def average_over_seeds(per_question: Sequence[pa.Table]) -> pa.Table:
    """Averages each question over seeds, because seeds are not independent questions.

    Args:
        per_question: One table per seed, as in `EvaluationResult.per_question`.

    Raises:
        EvaluationError: No table, or tables with different questions or measures.
    """
    names = [name for name in _first_table(per_question).column_names if name != "question_id"]
    ids = per_question[0]["question_id"].sort()
    columns = {name: np.mean(align_by_question(per_question, name), axis=0) for name in names}
    return pa.table({"question_id": ids, **columns})


def summarize_seeds(per_question: Sequence[pa.Table], measure: str) -> SeedSummary:
    """Computes mean and standard deviation of a measure over seeds.

    Args:
        per_question: One table per seed, as in `EvaluationResult.per_question`.
        measure: Name of the measure.

    Raises:
        EvaluationError: No table, or tables with different questions or without the measure.
    """
    _first_table(per_question)
    means = np.mean(align_by_question(per_question, measure), axis=1)
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    return SeedSummary(float(means.mean()), std, len(means))


def align_by_question(tables: Sequence[pa.Table], measure: str) -> list[QuestionValues]:
    """Returns the measure of each table in the order of sorted question ids, shape [questions].

    Raises:
        EvaluationError: Tables with different questions, or without the measure.
    """
    values, reference_ids = [], None
    for table in tables:
        if measure not in table.column_names:
            problem = f"no measure {measure!r} among {table.column_names}"
            raise EvaluationError(problem, fix="evaluate all systems with the same measures")
        sorted_table = table.sort_by("question_id")
        ids = sorted_table["question_id"].to_pylist()
        reference_ids = reference_ids or ids
        _check_same_questions(reference_ids, ids)
        values.append(sorted_table[measure].to_numpy().astype(np.float64))
    return values


def _check_same_questions(reference_ids: list[str], ids: list[str]) -> None:
    if ids != reference_ids or len(set(ids)) < len(ids):
        missing, unknown = set(reference_ids) - set(ids), set(ids) - set(reference_ids)
        raise EvaluationError(
            f"tables with different questions: {len(reference_ids):,} and {len(ids):,} questions "
            f"({len(set(ids)):,} distinct): {len(missing):,} missing {sorted(missing)[:3]}, "
            f"{len(unknown):,} other {sorted(unknown)[:3]}",
            fix="evaluate all systems on the same table with the same filter",
        )


def _first_table(tables: Sequence[pa.Table]) -> pa.Table:
    if not tables:
        raise EvaluationError("no table of per-question values; at least one seed is needed")
    return tables[0]
