"""Questions as lists of answers and other candidates, drawn anew each epoch.

Knows the rows of Parquet files. Must not know tokens, losses or models.

In an epoch every question with both kinds of candidates gives one list. Of two, it is one random
positive and one random negative (Mokrii et al. 2021, section 4; as in FlexNeuART).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.errors import CorpusError
from as2ray.records import question_starts
from as2ray.text.packing import ragged_arange


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

    def draw(
        self, questions: np.ndarray, candidates: int, random: np.random.Generator
    ) -> np.ndarray:
        """Row numbers of a list of each question, both kinds in it, each row as likely as another
        of its kind.

        Half of a list are positives, as far as there are any, and the rest negatives; where one
        kind runs out, the other fills its places.

        Args:
            questions: Their numbers, shape [questions].
            candidates: Most rows of a list, at least 2.
            random: Draws them.

        Returns:
            Positives, then negatives, then -1, shape [questions, candidates].
        """
        positives, negatives = self.positives[questions], self.negatives[questions]
        ours = np.minimum(positives, candidates // 2)
        others = np.minimum(negatives, candidates - ours)
        ours = np.minimum(positives, candidates - others)
        sizes = positives + negatives
        owner, place = np.repeat(np.arange(len(questions)), sizes), ragged_arange(sizes)
        other = place >= positives[owner]
        # Shuffled inside each kind, which keeps its places.
        row = (self.first[questions][owner] + place)[
            np.lexsort((random.random(len(owner)), other, owner))
        ]
        column = np.where(other, place - (positives - ours)[owner], place)
        kept = np.where(other, place - positives[owner] < others[owner], place < ours[owner])
        drawn = np.full((len(questions), candidates), -1)
        drawn[owner[kept], column[kept]] = self.rows[row[kept]]
        return drawn
