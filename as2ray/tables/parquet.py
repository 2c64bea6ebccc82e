"""The rows of Parquet files, numbered through, and any of them read in any order.

Knows Parquet. Must not know what the columns mean, or in which order an epoch reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.errors import CorpusError


@dataclass(frozen=True)
class ParquetTable:
    """The rows of Parquet files, numbered through."""

    paths: tuple[str, ...]
    row_counts: tuple[int, ...]

    @classmethod
    def open(cls, source: str | Path | Sequence[str | Path]) -> "ParquetTable":
        """The Parquet files of a folder (or a list of files or folders), in order of their names.

        Raises:
            CorpusError: No Parquet file, an unreadable one, or no rows at all.
        """
        sources = [source] if isinstance(source, str | Path) else source
        paths = [p for s in sources for p in _list_parquet_files(Path(s).resolve())]
        rows = tuple(_count_rows(p) for p in paths)
        if not sum(rows):
            raise CorpusError(
                f"{len(paths)} Parquet files with {sum(rows)} rows under {source}"
                "; expected at least one Parquet file of a candidates table",
                fix="prepare the corpus first: as2ray corpora prepare",
            )
        return cls(tuple(map(str, paths)), rows)

    def __len__(self) -> int:
        return sum(self.row_counts)

    def to_table(self) -> pa.Table:
        """All rows and columns in memory.

        Raises:
            CorpusError: A file that is damaged, or of other columns than another.
        """
        return _concat_tables([_read_file(path) for path in self.paths])

    def take(self, rows: np.ndarray, columns: Sequence[str]) -> pa.Table:
        """The rows `numbers` in that order; reads only the row groups that hold them."""
        wanted, place = np.unique(rows, return_inverse=True)
        ends = np.cumsum(self.row_counts)
        which = np.searchsorted(ends, wanted, side="right")
        tables = []
        for file in np.unique(which):
            inside = wanted[which == file] - (ends[file] - self.row_counts[file])
            tables.append(_read_rows(self.paths[file], inside, columns))
        return _concat_tables(tables).take(pa.array(place))


def _concat_tables(tables: Sequence[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise CorpusError(
            f"{len(tables)} Parquet files of one table: {error}"
            "; expected the same columns, of the same types, in all",
            fix="prepare the corpus again, or give one of the files",
        ) from error


def _list_parquet_files(path: Path) -> list[Path]:
    return sorted(path.glob("**/*.parquet")) if path.is_dir() else [path]


def _count_rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged_file_error(path, error) from error


def _damaged_file_error(path: str | Path, error: Exception) -> CorpusError:
    return CorpusError(
        f"{Path(path).name}: {error}; expected a complete Parquet file",
        fix="prepare the corpus again",
    )


def _read_file(path: str) -> pa.Table:
    try:
        return pq.ParquetFile(path).read()
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged_file_error(path, error) from error


def _read_rows(path: str, rows: np.ndarray, columns: Sequence[str]) -> pa.Table:
    try:
        return _take_rows(pq.ParquetFile(path), path, rows, columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged_file_error(path, error) from error


def _take_rows(
    file: pq.ParquetFile, path: str, rows: np.ndarray, columns: Sequence[str]
) -> pa.Table:
    missing = sorted(set(columns) - set(file.schema_arrow.names))
    if missing:
        raise CorpusError(
            f"{Path(path).name}: columns {file.schema_arrow.names} (missing {missing})"
            f"; expected the columns {list(columns)}",
            fix="prepare the corpus again, or score the teacher that the objective asks for",
        )
    sizes = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
    ends = np.cumsum(sizes)
    which = np.searchsorted(ends, rows, side="right")
    # One row group after the other: a window touches many, and needs an eighth of each.
    return pa.concat_tables(
        file.read_row_group(group, columns=list(columns)).take(
            pa.array(rows[which == group] - (ends[group] - sizes[group]))
        )
        for group in np.unique(which).tolist()
    )
