"""Reads examples that are question-candidate pairs, with stored logits of teachers."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.data.packed_dataset import EncodedExamples
from as2ray.data.row_reader import RowReader
from as2ray.errors import CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LOGIT_COLUMNS, TEACHER_LOGITS
from as2ray.text.packing import TokenSequences


@dataclass(frozen=True)
class PairReader(RowReader):
    """Reads pairs from Parquet files.

    Raises:
        CorpusError: A teacher's logits are not aligned with the pairs.
    """

    text_columns: ClassVar[tuple[str, ...]] = ("question", "candidate")

    columns: tuple[str, ...] = ("label",)
    """Numeric columns that become data of each sequence."""
    teachers: tuple[ParquetTable, ...] = ()
    """Stored logits of each teacher, aligned row by row with `files`."""
    weights: tuple[tuple[int, float], ...] = ()
    """Number of rows of each table in `files`, and the weight of its pairs; by default 1 each."""

    def __post_init__(self) -> None:
        sizes = [len(teacher) for teacher in self.teachers]
        if any(size != len(self.files) for size in sizes):
            raise CorpusError(
                f"teachers with logits of {sizes} pairs, the table has {len(self.files)} pairs",
                fix="score the whole table with every teacher",
            )

    def encode(self, rows: np.ndarray) -> EncodedExamples:
        """Reads and tokenizes rows, in order."""
        ids = ["candidate_id"] if self.teachers else []
        table = self.files.take(rows, [*self.text_columns, *ids, *self.columns])
        columns = {"row": rows, **{name: _to_numpy(table[name]) for name in self.columns}}
        if self.weights:
            sizes, values = zip(*self.weights)
            table_index = np.searchsorted(np.cumsum(sizes), rows, side="right")
            columns["weight"] = np.array(values, np.float32)[table_index]
        if self.teachers:
            logits = [_read_teacher_logits(teacher, rows, table) for teacher in self.teachers]
            columns[TEACHER_LOGITS] = np.concatenate(logits, 1)
        return EncodedExamples(self.tokenize(table), columns, np.ones(len(rows), np.int64))

    def tokenize(self, table: pa.Table) -> TokenSequences:
        """Tokenizes rows of the files."""
        return self.tokenizer.encode(*(table[name].to_pylist() for name in self.text_columns))


def _read_teacher_logits(teacher: ParquetTable, rows: np.ndarray, table: pa.Table) -> np.ndarray:
    """Reads a teacher's logits of rows of a table, shape [rows, 2]."""
    stored = teacher.take(rows, ["candidate_id", *LOGIT_COLUMNS])
    stored_ids, ids = stored["candidate_id"], table["candidate_id"]
    index = pc.index(pc.not_equal(stored_ids, ids), True).as_py()
    if index >= 0:
        raise CorpusError(
            f"row {rows[index]:,} is candidate {ids[index]}, its logits are of {stored_ids[index]}",
            fix="score this table again: the logits belong to another table",
        )
    return np.stack([_to_numpy(stored[name]) for name in LOGIT_COLUMNS], 1)


def _to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """Returns a column of numbers or of lists of numbers, shape [rows] or [rows, width]."""
    if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        return np.asarray(column.combine_chunks().flatten(), np.float32).reshape(len(column), -1)
    return np.asarray(column, np.float32)
