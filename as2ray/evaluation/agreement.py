"""Agreement of heads with teachers, and of a student with their majority (CERBERUS, section 5.3).

A system is right on a question if the candidate that it ranks first is positive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from as2ray.errors import EvaluationError
from as2ray.tables.ranking_order import table_ranking_order, validate_scores
from as2ray.tables.schema import question_indices

SystemScores = Mapping[str, np.ndarray]
"""Scores of all rows, shape [rows], by system."""


def top_candidates(table: pa.Table, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row that is ranked first for each question, and whether it is positive."""
    order = table_ranking_order(table, validate_scores(scores, table.num_rows))
    _, starts = np.unique(question_indices(table)[order], return_index=True)
    rows = order[starts]
    return rows, table["label"].to_numpy()[rows] == 1


def head_teacher_agreement(
    table: pa.Table, heads: SystemScores, teachers: SystemScores
) -> np.ndarray:
    """Computes the share of a head's right answers that a teacher gives too (Figure 3).

    Args:
        table: Candidates.
        heads: Scores of each head.
        teachers: Scores of each teacher.

    Returns:
        Shape [heads, teachers]; NaN for a head that is never right.
    """
    teacher_rows = [top_candidates(table, scores)[0] for scores in teachers.values()]
    shares = []
    for scores in heads.values():
        rows, is_right = top_candidates(table, scores)
        counts = [float(np.sum(is_right & (rows == other_rows))) for other_rows in teacher_rows]
        shares.append([count / is_right.sum() if is_right.any() else np.nan for count in counts])
    return np.array(shares)


@dataclass(frozen=True)
class MajorityAgreement:
    """How often a student is right, by the number of teachers that are right."""

    num_questions: tuple[int, ...]
    """Number of questions on which 0, 1, 2, ... teachers are right."""
    num_right: tuple[int, ...]
    """Number of these questions on which the student is right."""

    @property
    def all_right(self) -> tuple[int, int]:
        """Number right, and number of questions, with all teachers right (paper: 197 of 197)."""
        return self.num_right[-1], self.num_questions[-1]

    @property
    def majority_right(self) -> tuple[int, int]:
        """The same with most but not all teachers right (17 in the paper)."""
        half = len(self.num_right) // 2
        return sum(self.num_right[half:-1]), sum(self.num_questions[half:-1])

    @property
    def minority_right(self) -> tuple[int, int]:
        """The same with some teachers right, but not most (1 in the paper)."""
        half = len(self.num_right) // 2
        return sum(self.num_right[1:half]), sum(self.num_questions[1:half])


class VoteCase(NamedTuple):
    """The questions of which as many teachers, and the student or not, are right."""

    num_teachers_right: int
    student_is_right: bool
    num_questions: int
    majority_confidence: float
    """Mean score that the majority of the teachers gives to its first candidates."""
    minority_confidence: float | None
    """Mean of the highest score among the others; None if all teachers are of one side."""


def list_vote_cases(table: pa.Table, student: np.ndarray, teachers: SystemScores) -> list[VoteCase]:
    """Returns with which confidence teachers vote where a student follows or overrides them.

    Args:
        table: Candidates.
        student: Scores of the student, shape [rows].
        teachers: Scores of each teacher, which are probabilities; an odd number of teachers.
    """
    tops = [(scores, *top_candidates(table, scores)) for scores in teachers.values()]
    are_right = np.stack([is_right for _, _, is_right in tops])
    confidence = np.stack([scores[rows] for scores, rows, _ in tops])
    num_right = are_right.sum(0)
    in_majority = are_right == (num_right > len(tops) / 2)
    majority = (confidence * in_majority).sum(0) / in_majority.sum(0)
    minority = np.where(in_majority, -np.inf, confidence).max(0)
    student_is_right = top_candidates(table, student)[1]
    cases = []
    for count, is_right in product(range(len(tops), -1, -1), (True, False)):
        mask = (num_right == count) & (student_is_right == is_right)
        if mask.any():
            is_split = 0 < count < len(tops)
            highest = float(minority[mask].mean()) if is_split else None
            mean = float(majority[mask].mean())
            cases.append(VoteCase(count, is_right, int(mask.sum()), mean, highest))
    return cases


def measure_majority_agreement(
    table: pa.Table, student: np.ndarray, teachers: SystemScores
) -> MajorityAgreement:
    """Counts how often a student agrees with the majority of its teachers.

    Args:
        table: Candidates.
        student: Scores of the student, shape [rows].
        teachers: Scores of each teacher.

    Raises:
        EvaluationError: A single teacher or an even number, which may have no majority.
    """
    if len(teachers) < 3 or len(teachers) % 2 == 0:
        problem = f"{len(teachers)} teachers; a majority needs an odd number, at least three"
        raise EvaluationError(problem)
    teachers_are_right = [top_candidates(table, scores)[1] for scores in teachers.values()]
    teachers_right = np.sum(teachers_are_right, axis=0)
    _, student_is_right = top_candidates(table, student)
    num_questions = np.bincount(teachers_right, minlength=len(teachers) + 1)
    num_right = np.bincount(teachers_right, student_is_right, len(teachers) + 1).astype(int)
    return MajorityAgreement(tuple(num_questions.tolist()), tuple(num_right.tolist()))
