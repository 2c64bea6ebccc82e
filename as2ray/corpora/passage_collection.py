"""Passages by their numbers: a collection too large for memory, spread on disk while it is read.

Knows Arrow tables with a numeric id. Must not know any corpus.
"""

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
"""Of the tables that come in."""


@dataclass(frozen=True)
class PassageCollection:
    """Passages that lie in a file."""

    batches: list[pa.RecordBatch]
    ids: np.ndarray
    """Ascending, shape [passages]."""
    row_of_id: np.ndarray
    """Row of each id, through all batches, shape [passages]."""
    batch_ends: np.ndarray
    """Rows up to the end of each batch."""
    source: str
    """What it was read from, for errors."""

    def read_texts(self, ids: np.ndarray) -> list[str]:
        """The texts of passages.

        Raises:
            CorpusError: An id that the collection does not have.
        """
        at = np.searchsorted(self.ids, ids)
        found = self.ids[np.minimum(at, len(self.ids) - 1)] == ids if len(self.ids) else ids < 0
        if not found.all():
            missing = ids[~found]
            raise CorpusError(
                f"{self.source}: {len(missing):,} passages are missing, such as {missing[0]}"
                "; expected every passage that a run or a judgement names",
                fix="give the collection that they were made from, whole",
            )
        rows = self.row_of_id[at]
        batch = np.searchsorted(self.batch_ends, rows, side="right")
        first = np.concatenate([[0], self.batch_ends])[batch]
        return [
            self.batches[b]["text"][int(row)].as_py()
            for b, row in zip(batch.tolist(), (rows - first).tolist())
        ]


@contextmanager
def open_collection(tables: Iterable[pa.Table], source_name: str) -> Iterator[PassageCollection]:
    """The passages of a stream of tables, on disk as long as the context lasts.

    Raises:
        CorpusError: An id that comes twice, or no room in the temporary folder.
    """
    with TemporaryDirectory(prefix="as2ray-collection-") as folder:
        path = Path(folder) / "passages.arrow"
        _write_collection(tables, path, source_name)
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            ids = np.concatenate([np.zeros(0, np.int64), *(b["id"].to_numpy() for b in batches)])
            place = np.argsort(ids, kind="stable")
            if len(again := np.flatnonzero(np.diff(ids[place]) == 0)):
                raise CorpusError(
                    f"{source_name}: passage {ids[place][again[0]]} comes twice"
                    "; expected one text for each id",
                    fix="give the publisher's own file",
                )
            ends = np.cumsum([b.num_rows for b in batches])
            yield PassageCollection(batches, ids[place], place, ends, source_name)


def _write_collection(tables: Iterable[pa.Table], path: Path, source: str) -> None:
    try:
        with pa.ipc.new_file(str(path), COLLECTION_SCHEMA) as file:
            for table in tables:
                file.write_table(table.cast(COLLECTION_SCHEMA))
    except OSError as error:
        raise CorpusError(
            f"{source}: {error}; expected room for all of it, unpacked, in the temporary folder",
            fix="make room there, or set TMPDIR to a larger disk",
        ) from error


def parse_passage_ids(column: pa.ChunkedArray, source: str) -> pa.ChunkedArray:
    """Ids such as `D1234567` or `1234567` as numbers.

    Raises:
        CorpusError: One that is neither.
    """
    digits = pc.replace_substring_regex(column, "^D", "")
    try:
        return digits.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise CorpusError(
            f"{source}: {error}; expected ids of digits, or D and digits",
            fix="give the publisher's own file",
        ) from error
