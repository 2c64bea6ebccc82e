"""Examples that are question-candidate pairs, with the stored logits of their teachers."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.data.packed_dataset import EncodedExamples
from as2ray.errors import CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LOGIT_COLUMNS, TEACHER_LOGITS
from as2ray.text.packing import TokenSequences
from as2ray.text.tokenization import PairTokenizer


@dataclass(frozen=True)
class PairReader:
    """Reads pairs from Parquet files."""

    text_columns: ClassVar[tuple[str, ...]] = ("question", "candidate")
    max_sequences: ClassVar[int] = 1

    files: ParquetTable
    tokenizer: PairTokenizer
    columns: tuple[str, ...] = ("label",)
    """Numeric columns that travel with each pair."""
    teachers: tuple[ParquetTable, ...] = ()
    """Stored logits of each teacher, row for row beside `files`."""

    def __post_init__(self) -> None:
        sizes = [len(teacher) for teacher in self.teachers]
        if any(size != len(self.files) for size in sizes):
            raise CorpusError(
                f"stored logits of {sizes} pairs for {len(self.files):,} pairs"
                "; expected logits of every teacher for every pair",
                fix="score these tables with the teachers, to the end",
            )

    @property
    def num_examples(self) -> int:
        """Pairs."""
        return len(self.files)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest pair."""
        return self.tokenizer.max_length

    def sample_rows(self, examples: np.ndarray, seed: list[int]) -> np.ndarray:
        """An example is a row."""
        return examples

    def encode(self, rows: np.ndarray) -> EncodedExamples:
        """The rows as tokens, in that order."""
        ids = ["candidate_id"] if self.teachers else []
        table = self.files.take(rows, [*self.text_columns, *ids, *self.columns])
        columns = {"row": rows, **{name: _to_numpy(table[name]) for name in self.columns}}
        if self.teachers:
            logits = [_teacher_logits(teacher, rows, table) for teacher in self.teachers]
            columns[TEACHER_LOGITS] = np.concatenate(logits, 1)
        return EncodedExamples(self.tokenize(table), columns, np.ones(len(rows), np.int64))

    def tokenize(self, table: pa.Table) -> TokenSequences:
        """The token sequences of rows of the files."""
        return self.tokenizer.encode(*(table[name].to_pylist() for name in self.text_columns))


def _teacher_logits(teacher: ParquetTable, rows: np.ndarray, table: pa.Table) -> np.ndarray:
    """A teacher's logits of rows of a table, shape [rows, 2]."""
    stored = teacher.take(rows, ["candidate_id", *LOGIT_COLUMNS])
    differs = pc.not_equal(stored["candidate_id"], table["candidate_id"])
    if pc.any(differs).as_py():
        at = pc.index(differs, True).as_py()
        raise CorpusError(
            f"stored logits of candidate {stored['candidate_id'][at]} in row {rows[at]:,}"
            f"; expected of candidate {table['candidate_id'][at]}, the table's",
            fix="score this table again: its logits were made from another",
        )
    return np.stack([_to_numpy(stored[name]) for name in LOGIT_COLUMNS], 1)


def _to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A numeric or list-of-numbers column as an array, shape [rows] or [rows, width]."""
    if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat, np.float32).reshape(len(column), -1)
    return np.asarray(column.to_numpy(), np.float32)
