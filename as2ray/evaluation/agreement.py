"""Whether heads resemble their teachers, and a student a vote of them (CERBERUS, section 5.3).

Knows scores of several systems on one table. Must not know models.

A system is right on a question if the candidate that it ranks first answers it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from as2ray.errors import EvaluationError
from as2ray.evaluation.order import checked_scores, order_of
from as2ray.records import question_numbers

Scores = Mapping[str, np.ndarray]
"""Scores of all rows, shape [rows], by the system's name."""


def first_choices(table: pa.Table, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row that each question's ranking starts with, and whether it answers; [questions]."""
    order = order_of(table, checked_scores(scores, table.num_rows))
    _, starts = np.unique(question_numbers(table)[order], return_index=True)
    rows = order[starts]
    return rows, table["label"].to_numpy()[rows] == 1


def agreement(table: pa.Table, heads: Scores, teachers: Scores) -> np.ndarray:
    """Figure 3: of each head's right answers the part that a teacher gives too; [heads, teachers].

    A head that is never right has NaN.
    """
    taught = [first_choices(table, scores) for scores in teachers.values()]
    rows = []
    for scores in heads.values():
        choice, right = first_choices(table, scores)
        same = [float(np.sum(right & (choice == other))) for other, _ in taught]
        rows.append([count / right.sum() if right.any() else np.nan for count in same])
    return np.array(rows)


@dataclass(frozen=True)
class Votes:
    """Questions by how many teachers are right, and how often the student is right there."""

    questions: tuple[int, ...]
    """With 0, 1, 2, ... teachers right."""
    right: tuple[int, ...]
    """Of these, those on which the student is right."""

    @property
    def unanimous(self) -> tuple[int, int]:
        """Student right, and questions, where all teachers are (197 of 197 in the paper)."""
        return self.right[-1], self.questions[-1]

    @property
    def followed(self) -> tuple[int, int]:
        """Likewise where most teachers are right and not all (17 in the paper)."""
        teachers = len(self.questions) - 1
        return self._over(range(teachers // 2 + 1, teachers))

    @property
    def overruled(self) -> tuple[int, int]:
        """Likewise where some teacher is right and most are not (1 in the paper)."""
        return self._over(range(1, (len(self.questions) - 1) // 2 + 1))

    def _over(self, numbers: Sequence[int]) -> tuple[int, int]:
        return sum(self.right[n] for n in numbers), sum(self.questions[n] for n in numbers)


def votes(table: pa.Table, student: np.ndarray, teachers: Scores) -> Votes:
    """How a student stands to the majority of its teachers.

    Raises:
        EvaluationError: Fewer than two teachers, or an even number: half of them is no majority.
    """
    if len(teachers) < 2 or len(teachers) % 2 == 0:
        raise EvaluationError(
            f"{len(teachers)} teachers",
            expected="an odd number of teachers, at least three",
            mend="leave one out",
        )
    right = sum(first_choices(table, scores)[1].astype(int) for scores in teachers.values())
    _, own = first_choices(table, student)
    sizes = np.bincount(right, minlength=len(teachers) + 1)
    found = np.bincount(right, own, len(teachers) + 1).astype(int)
    return Votes(tuple(sizes.tolist()), tuple(found.tolist()))
