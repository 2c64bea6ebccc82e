"""Random access to the rows of several Parquet files, numbered through as one table."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.errors import CorpusError

ROW_GROUP_SIZE = 2_048
"""Rows of a row group, the smallest unit that a reader decodes. As many adjacent rows stay together
when an epoch is shuffled."""


@dataclass(frozen=True)
class ParquetTable:
    """The rows of Parquet files, numbered through."""

    paths: tuple[str, ...]
    row_counts: tuple[int, ...]

    @classmethod
    def open(cls, source: str | Path | Sequence[str | Path]) -> "ParquetTable":
        """Opens the Parquet files of a folder, or of several files and folders, sorted by name.

        Raises:
            CorpusError: No Parquet file, an unreadable one, or no rows.
        """
        sources = [source] if isinstance(source, str | Path) else source
        paths = [path for s in sources for path in list_parquet_files(Path(s).resolve())]
        row_counts = tuple(map(_count_rows, paths))
        if not sum(row_counts):
            problem = f"{len(paths)} Parquet files with 0 rows under {source}"
            raise CorpusError(problem, fix="prepare the corpus first: as2ray corpora prepare")
        return cls(tuple(map(str, paths)), row_counts)

    def __len__(self) -> int:
        return sum(self.row_counts)

    def to_table(self) -> pa.Table:
        """Reads all rows and columns into memory.

        Raises:
            CorpusError: A damaged file, or files with different columns.
        """
        return _concat_tables([_read_file(path) for path in self.paths])

    def take(self, rows: np.ndarray, columns: Sequence[str]) -> pa.Table:
        """Reads rows in the given order, from the row groups that contain them.

        Args:
            rows: Row numbers, in any order; may repeat.
            columns: Names of the columns to read.

        Raises:
            CorpusError: A damaged file, or one without these columns.
        """
        unique_rows, position = np.unique(rows, return_inverse=True)
        tables = [
            _read_rows(self.paths[file], file_rows, columns)
            for file, file_rows in _split_rows(unique_rows, self.row_counts)
        ]
        return _concat_tables(tables).take(pa.array(position))


def write_part(table: pa.Table, path: str | Path, first_row: int = 0) -> None:
    """Writes a part of a table as a Parquet file.

    Row groups begin at multiples of `ROW_GROUP_SIZE` of the whole table, like the reader's spans.

    Args:
        table: Rows of the part.
        path: The file.
        first_row: Number of rows in the parts before.
    """
    first_group = -first_row % ROW_GROUP_SIZE
    with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for rows in (table.slice(0, first_group), table.slice(first_group)):
            if rows.num_rows:
                writer.write_table(rows, ROW_GROUP_SIZE)


@contextmanager
def _parquet_errors(path: str | Path) -> Iterator[None]:
    """Turns errors of a damaged Parquet file inside the block into a `CorpusError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorpusError(f"there is no table {path}") from error
    except (OSError, pa.ArrowInvalid) as error:
        problem = f"{Path(path).name} is not a complete Parquet file: {error}"
        is_parquet = Path(path).suffix == ".parquet" or Path(path).is_dir()
        fix = "prepare the corpus again" if is_parquet else "convert it to Parquet"
        raise CorpusError(problem, fix=fix) from error


def _concat_tables(tables: Sequence[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        problem = f"{len(tables)} Parquet files have different columns or types: {error}"
        raise CorpusError(problem, fix="prepare the corpus again, or give one file") from error


def list_parquet_files(path: Path) -> list[Path]:
    """Returns the Parquet files below a folder, sorted, or the path of a file."""
    return sorted(path.glob("**/*.parquet")) if path.is_dir() else [path]


def _count_rows(path: Path) -> int:
    with _parquet_errors(path):
        return int(pq.read_metadata(path).num_rows)


def _read_file(path: str) -> pa.Table:
    with _parquet_errors(path):
        return pq.ParquetFile(path).read()


def _read_rows(path: str, rows: np.ndarray, columns: Sequence[str]) -> pa.Table:
    with _parquet_errors(path):
        file = pq.ParquetFile(path)
        missing = sorted(set(columns) - set(file.schema_arrow.names))
        if missing:
            raise CorpusError(
                f"{Path(path).name} has no columns {missing}; it has {file.schema_arrow.names}",
                fix="prepare the corpus again, or score the teachers that the loss needs",
            )
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
        # One row group at a time: a window touches many groups and needs few rows of each.
        return pa.concat_tables(
            file.read_row_group(group, columns=list(columns)).take(pa.array(group_rows))
            for group, group_rows in _split_rows(rows, sizes)
        )


def _split_rows(rows: np.ndarray, sizes: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each file or row group that has some of the ascending rows, and these rows in it."""
    ends = np.cumsum(sizes)
    part_index = np.searchsorted(ends, rows, side="right")
    for part in np.unique(part_index).tolist():
        yield part, rows[part_index == part] - (ends[part] - sizes[part])
