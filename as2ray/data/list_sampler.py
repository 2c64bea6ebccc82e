"""Samples lists of positive and negative candidates of each question, anew in every epoch.

In an epoch every question with both labels gives one list. A list of two is one random positive and
one random negative (Mokrii et al. 2021, section 4; as in FlexNeuART).
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
    """The questions that have positive and negative candidates."""

    positive_bits: np.ndarray
    """Whether each row is positive, 8 rows a byte: the sampler travels to every task."""
    starts: np.ndarray
    """First row of each question, shape [questions]."""
    num_positives: np.ndarray
    """Positives of each question, at least 1, shape [questions]."""
    num_negatives: np.ndarray
    """Negatives of each question, at least 1, shape [questions]."""

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def from_files(cls, paths: Sequence[str]) -> "ListSampler":
        """Reads the labels of Parquet files; row indices count through all files.

        Raises:
            CorpusError: No question has both labels.
        """
        tables = [pq.read_table(path, columns=["question_id", "label"]) for path in paths]
        sampler = cls.from_tables(tables)
        if not len(sampler):
            num_rows = sum(table.num_rows for table in tables)
            raise CorpusError(
                f"{len(paths)} files with {num_rows:,} candidates: no question has both labels",
                fix="give a table with both labels and the rows of each question adjacent",
            )
        return sampler

    @classmethod
    def from_tables(cls, tables: Sequence[pa.Table]) -> "ListSampler":
        """Reads the labels of tables; row indices count through all tables.

        A question does not continue from one table into the next.
        """
        ends = np.cumsum([0, *(table.num_rows for table in tables)])
        offsets = [question_offsets(t["question_id"]) + end for t, end in zip(tables, ends)]
        labels = [table["label"].to_numpy() > 0 for table in tables]
        starts = np.concatenate([*offsets, np.zeros(0, np.int64)])
        is_positive = np.concatenate([*labels, np.zeros(0, bool)])
        sizes = np.diff(np.append(starts, ends[-1]))
        num_positives = np.add.reduceat(is_positive, starts, dtype=np.int64)
        has_both = (num_positives > 0) & (num_positives < sizes)
        counts = num_positives[has_both], (sizes - num_positives)[has_both]
        return cls(np.packbits(is_positive), starts[has_both], *counts)

    def sample(
        self, question_indices: np.ndarray, list_size: int, random: np.random.Generator
    ) -> np.ndarray:
        """Samples a list of rows for each question, uniformly among the rows of each label.

        Up to half of a list are positives and the rest negatives. If there are too few of one
        label, rows of the other fill the list.

        Args:
            question_indices: Shape [questions].
            list_size: Maximum number of rows of a list, at least 2.
            random: Random generator.

        Returns:
            Row indices, shape [questions, list_size]: positives, then negatives, then -1.
        """
        num_positives = self.num_positives[question_indices]
        num_negatives = self.num_negatives[question_indices]
        list_positives = np.minimum(num_positives, list_size // 2)
        list_negatives = np.minimum(num_negatives, list_size - list_positives)
        list_positives = np.minimum(num_positives, list_size - list_negatives)
        sizes = num_positives + num_negatives
        question, position = np.repeat(np.arange(len(sizes)), sizes), ragged_arange(sizes)
        row = self.starts[question_indices][question] + position
        is_positive = self.positive_bits[row >> 3] >> (7 - (row & 7)) & 1
        row = row[np.lexsort((is_positive == 0, question))]  # positives first
        is_negative = position >= num_positives[question]
        # Shuffles the rows of each label; positives stay before negatives.
        row = row[np.lexsort((random.random(len(question)), is_negative, question))]
        # Counts from 0 among the rows of each label.
        rank = position - num_positives[question] * is_negative
        column = rank + list_positives[question] * is_negative
        list_counts = np.where(is_negative, list_negatives[question], list_positives[question])
        is_sampled = rank < list_counts
        sampled_rows = np.full((len(sizes), list_size), -1)
        sampled_rows[question[is_sampled], column[is_sampled]] = row[is_sampled]
        return sampled_rows
