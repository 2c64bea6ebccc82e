"""The fingerprint of a table's content."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Fingerprint:
    """SHA-256 over the content of a table that comes in pieces, whatever the pieces are.

    Lengths and characters of every column are hashed apart, so neither the chunking nor the
    file layout of a table changes its fingerprint; its rows, their order and the names of its
    columns do.
    """

    def __init__(self) -> None:
        self._columns: dict[str, tuple[hashlib._Hash, hashlib._Hash]] = {}

    def update(self, table: pa.Table | pa.RecordBatch) -> "Fingerprint":
        """Adds the rows of `table`."""
        for name in table.column_names:
            lengths, content = self._columns.setdefault(name, (hashlib.sha256(), hashlib.sha256()))
            column = table[name]
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            for chunk in chunks:
                values = chunk if pa.types.is_string(chunk.type) else chunk.cast(pa.string())
                size = pc.binary_length(values).fill_null(-1)
                lengths.update(size.to_numpy(zero_copy_only=False).astype(np.int32).tobytes())
                content.update(_utf8_bytes(values))
        return self

    def hexdigest(self) -> str:
        """16 hexadecimal digits."""
        whole = hashlib.sha256()
        for name in sorted(self._columns):
            whole.update(name.encode())
            for part in self._columns[name]:
                whole.update(part.digest())
        return whole.hexdigest()[:16]


def _utf8_bytes(values: pa.StringArray) -> memoryview:
    dense = pc.drop_null(values)
    _, offsets, data = dense.buffers()
    if data is None or len(dense) == 0:
        return memoryview(b"")
    bounds = np.frombuffer(offsets, np.int32)[dense.offset : dense.offset + len(dense) + 1]
    return memoryview(data)[bounds[0] : bounds[-1]]


def fingerprint(table: pa.Table) -> str:
    """Fingerprint of a whole table, 16 hexadecimal digits."""
    return Fingerprint().update(table).hexdigest()
