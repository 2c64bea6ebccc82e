"""Whether heads resemble their teachers, and a student a vote of them (CERBERUS, section 5.3).

Knows scores of several systems on one table. Must not know models.

A system is right on a question if the candidate that it ranks first answers it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from as2ray.errors import EvaluationError
from as2ray.tables.ranking_order import table_ranking_order, validate_scores
from as2ray.tables.schema import question_indices

SystemScores = Mapping[str, np.ndarray]
"""Scores of all rows, shape [rows], by the system's name."""


def top_candidates(table: pa.Table, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row that each question's ranking starts with, and whether it answers; [questions]."""
    order = table_ranking_order(table, validate_scores(scores, table.num_rows))
    _, starts = np.unique(question_indices(table)[order], return_index=True)
    rows = order[starts]
    return rows, table["label"].to_numpy()[rows] == 1


def head_teacher_agreement(
    table: pa.Table, heads: SystemScores, teachers: SystemScores
) -> np.ndarray:
    """Figure 3: of each head's right answers the part that a teacher gives too; [heads, teachers].

    A head that is never right has NaN.
    """
    taught = [top_candidates(table, scores) for scores in teachers.values()]
    rows = []
    for scores in heads.values():
        choice, right = top_candidates(table, scores)
        same = [float(np.sum(right & (choice == other))) for other, _ in taught]
        rows.append([count / right.sum() if right.any() else np.nan for count in same])
    return np.array(rows)


@dataclass(frozen=True)
class MajorityAgreement:
    """Questions by how many teachers are right, and how often the student is right there."""

    num_questions: tuple[int, ...]
    """With 0, 1, 2, ... teachers right."""
    num_right: tuple[int, ...]
    """Of these, those on which the student is right."""

    @property
    def all_right(self) -> tuple[int, int]:
        """Student right, and questions, where all teachers are (197 of 197 in the paper)."""
        return self.num_right[-1], self.num_questions[-1]

    @property
    def majority_right(self) -> tuple[int, int]:
        """Likewise where most teachers are right and not all (17 in the paper)."""
        teachers = len(self.num_questions) - 1
        return self._sum_over(range(teachers // 2 + 1, teachers))

    @property
    def minority_right(self) -> tuple[int, int]:
        """Likewise where some teacher is right and most are not (1 in the paper)."""
        return self._sum_over(range(1, (len(self.num_questions) - 1) // 2 + 1))

    def _sum_over(self, teachers_right: Sequence[int]) -> tuple[int, int]:
        return sum(self.num_right[n] for n in teachers_right), sum(
            self.num_questions[n] for n in teachers_right
        )


def measure_majority_agreement(
    table: pa.Table, student: np.ndarray, teachers: SystemScores
) -> MajorityAgreement:
    """How a student stands to the majority of its teachers.

    Raises:
        EvaluationError: Fewer than two teachers, or an even number: half of them is no majority.
    """
    if len(teachers) < 2 or len(teachers) % 2 == 0:
        raise EvaluationError(
            f"{len(teachers)} teachers; expected an odd number of teachers, at least three",
        )
    right = sum(top_candidates(table, scores)[1].astype(int) for scores in teachers.values())
    _, own = top_candidates(table, student)
    sizes = np.bincount(right, minlength=len(teachers) + 1)
    found = np.bincount(right, own, len(teachers) + 1).astype(int)
    return MajorityAgreement(tuple(sizes.tolist()), tuple(found.tolist()))
