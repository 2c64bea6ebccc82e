"""Questions as pairs of an answer and another candidate, drawn anew each epoch.

Knows the rows of Parquet files. Must not know tokens, losses or models.

In an epoch every question with both kinds of candidates gives one pair (Mokrii et al. 2021,
section 4; as in FlexNeuART, one random positive and one random negative).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.errors import CorpusError
from as2ray.records import question_starts


@dataclass(frozen=True)
class Contrasts:
    """The questions that have both kinds of candidates."""

    rows: np.ndarray
    """Row numbers, question by question, positives first, shape [rows]."""
    first: np.ndarray
    """Where each question begins in `rows`, shape [questions]."""
    positives: np.ndarray
    """Of each question, at least 1, shape [questions]."""
    negatives: np.ndarray
    """Of each question, at least 1, shape [questions]."""

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def find(cls, paths: Sequence[str]) -> "Contrasts":
        """Those of Parquet files, whose rows are numbered through.

        Raises:
            CorpusError: No question has both kinds.
        """
        tables = [pq.read_table(path, columns=["question_id", "label"]) for path in paths]
        found = cls.of(tables)
        if not len(found):
            raise CorpusError(
                f"{len(paths)} files with {sum(t.num_rows for t in tables):,} candidates",
                expected="a question with an answer and another candidate",
                mend="give a table with labels of both kinds, adjacent by question",
            )
        return found

    @classmethod
    def of(cls, tables: Sequence[pa.Table]) -> "Contrasts":
        """Those of tables whose rows are numbered through; a question ends with its table."""
        ends = np.cumsum([0, *(t.num_rows for t in tables)])
        starts = [question_starts(t["question_id"]) + end for t, end in zip(tables, ends)]
        first = np.concatenate([*starts, np.zeros(0, np.int64)])
        label = np.concatenate([t["label"].to_numpy() > 0 for t in tables] or [np.zeros(0, bool)])
        size = np.diff(np.append(first, ends[-1]))
        question = np.repeat(np.arange(len(first)), size)
        positives = np.bincount(question[label], minlength=len(first))
        both = (positives > 0) & (positives < size)
        rows = np.lexsort((~label, question))
        return cls(rows, first[both], positives[both], (size - positives)[both])

    def draw(self, questions: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Row numbers of a positive and a negative of each question, shape [questions, 2]."""
        first, positives = self.first[questions], self.positives[questions]
        ours, others = random.random((2, len(questions)))
        positive = first + (ours * positives).astype(np.int64)
        negative = first + positives + (others * self.negatives[questions]).astype(np.int64)
        drawn: np.ndarray = self.rows[np.stack([positive, negative], 1)]
        return drawn
