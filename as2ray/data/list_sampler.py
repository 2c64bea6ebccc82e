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
from as2ray.tables.schema import question_offsets
from as2ray.text.packing import ragged_arange


@dataclass(frozen=True)
class ListSampler:
    """The questions that have both kinds of candidates."""

    rows: np.ndarray
    """Row numbers, question by question, positives first, shape [rows]."""
    starts: np.ndarray
    """Where each question begins in `rows`, shape [questions]."""
    num_positives: np.ndarray
    """Of each question, at least 1, shape [questions]."""
    num_negatives: np.ndarray
    """Of each question, at least 1, shape [questions]."""

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def from_files(cls, paths: Sequence[str]) -> "ListSampler":
        """Those of Parquet files, whose rows are numbered through.

        Raises:
            CorpusError: No question has both kinds.
        """
        tables = [pq.read_table(path, columns=["question_id", "label"]) for path in paths]
        found = cls.from_tables(tables)
        if not len(found):
            raise CorpusError(
                f"{len(paths)} files with {sum(t.num_rows for t in tables):,} candidates"
                "; expected a question with an answer and another candidate",
                fix="give a table with labels of both kinds, adjacent by question",
            )
        return found

    @classmethod
    def from_tables(cls, tables: Sequence[pa.Table]) -> "ListSampler":
        """Those of tables whose rows are numbered through; a question ends with its table."""
        ends = np.cumsum([0, *(t.num_rows for t in tables)])
        starts = [question_offsets(t["question_id"]) + end for t, end in zip(tables, ends)]
        first = np.concatenate([*starts, np.zeros(0, np.int64)])
        label = np.concatenate([t["label"].to_numpy() > 0 for t in tables] or [np.zeros(0, bool)])
        size = np.diff(np.append(first, ends[-1]))
        question = np.repeat(np.arange(len(first)), size)
        positives = np.bincount(question[label], minlength=len(first))
        both = (positives > 0) & (positives < size)
        rows = np.lexsort((~label, question))
        return cls(rows, first[both], positives[both], (size - positives)[both])

    def sample(
        self, question_indices: np.ndarray, list_size: int, random: np.random.Generator
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
        positives, negatives = (
            self.num_positives[question_indices],
            self.num_negatives[question_indices],
        )
        ours = np.minimum(positives, list_size // 2)
        others = np.minimum(negatives, list_size - ours)
        ours = np.minimum(positives, list_size - others)
        sizes = positives + negatives
        owner, place = np.repeat(np.arange(len(question_indices)), sizes), ragged_arange(sizes)
        other = place >= positives[owner]
        # Shuffled inside each kind, which keeps its places.
        row = (self.starts[question_indices][owner] + place)[
            np.lexsort((random.random(len(owner)), other, owner))
        ]
        column = np.where(other, place - (positives - ours)[owner], place)
        kept = np.where(other, place - positives[owner] < others[owner], place < ours[owner])
        drawn = np.full((len(question_indices), list_size), -1)
        drawn[owner[kept], column[kept]] = self.rows[row[kept]]
        return drawn
