"""Reads passages by their ids from a collection that is too large for memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError

COLLECTION_SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.large_string())])
"""Columns of the tables that a collection is made of."""


@dataclass(frozen=True)
class PassageCollection:
    """Passages in a memory-mapped file."""

    batches: list[pa.RecordBatch]
    ids: np.ndarray
    """Ascending, shape [passages]."""
    row_of_id: np.ndarray
    """Row of each id, counted over all batches, shape [passages]."""
    batch_starts: np.ndarray
    """Row at which each batch starts, shape [batches]."""
    source: str
    """What it was read from, for error texts."""

    def read_texts(self, ids: np.ndarray) -> list[str]:
        """Returns the texts of passages.

        Args:
            ids: Ids, shape [passages].

        Raises:
            CorpusError: The collection lacks an id.
        """
        position = np.searchsorted(self.ids, ids)
        is_present = np.searchsorted(self.ids, ids, side="right") > position
        if not is_present.all():
            missing = ids[~is_present]
            problem = f"{self.source}: {len(missing):,} passages are missing, such as {missing[0]}"
            raise CorpusError(problem, fix="use the collection that the run was made from")
        rows = self.row_of_id[position]
        batch_index = np.searchsorted(self.batch_starts, rows, side="right") - 1
        rows_in_batch = rows - self.batch_starts[batch_index]
        return [
            self.batches[batch]["text"][row].as_py()
            for batch, row in zip(batch_index.tolist(), rows_in_batch.tolist())
        ]


@contextmanager
def open_collection(tables: Iterable[pa.Table], source_name: str) -> Iterator[PassageCollection]:
    """Writes a stream of passages to a temporary file, which exists as long as the context.

    Args:
        tables: Tables of `COLLECTION_SCHEMA`.
        source_name: What they are read from, for error texts.

    Raises:
        CorpusError: An id occurs twice, or the temporary folder is full.
    """
    with TemporaryDirectory(prefix="as2ray-collection-") as folder:
        path = Path(folder) / "passages.arrow"
        _write_collection(tables, path, source_name)
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            ids = np.concatenate([np.zeros(0, np.int64), *(b["id"].to_numpy() for b in batches)])
            row_of_id = np.argsort(ids, kind="stable")
            sorted_ids = ids[row_of_id]
            if len(repeated := np.flatnonzero(np.diff(sorted_ids) == 0)):
                problem = f"{source_name}: passage {sorted_ids[repeated[0]]} occurs twice"
                raise CorpusError(problem, fix="use the published file")
            batch_starts = np.cumsum([0, *(batch.num_rows for batch in batches[:-1])])
            yield PassageCollection(batches, sorted_ids, row_of_id, batch_starts, source_name)


def _write_collection(tables: Iterable[pa.Table], path: Path, source: str) -> None:
    try:
        with pa.ipc.new_file(str(path), COLLECTION_SCHEMA) as file:
            for table in tables:
                file.write_table(table.cast(COLLECTION_SCHEMA))
    except OSError as error:
        problem = f"{source} does not fit uncompressed into the temporary folder: {error}"
        raise CorpusError(problem, fix="free space, or set TMPDIR to a larger disk") from error


def parse_passage_id(text: str) -> int:
    """Returns an id such as `D1234567` or `1234567` as a number."""
    return int(text.removeprefix("D"))


def parse_passage_ids(column: pa.ChunkedArray, source: str) -> pa.ChunkedArray:
    """Returns a column of ids such as `D1234567` or `1234567` as numbers.

    Raises:
        CorpusError: An id of another format.
    """
    try:
        return pc.replace_substring_regex(column, "^D", "").cast(pa.int64())
    except pa.ArrowInvalid as error:
        problem = f"{source}: passage ids are digits, or D and digits; {error}"
        raise CorpusError(problem, fix="use the published file") from error
