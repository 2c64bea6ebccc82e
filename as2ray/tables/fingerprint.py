"""Fingerprint of the content of a table."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Fingerprint:
    """SHA-256 of a table that arrives in chunks.

    The fingerprint depends on the rows, their order and the column names. It does not depend on
    the chunks or on the file layout, because lengths and characters of each column are hashed
    separately.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, tuple[hashlib._Hash, hashlib._Hash]] = {}

    def update(self, table: pa.Table) -> "Fingerprint":
        """Adds the rows of `table`."""
        for name in table.column_names:
            new_hashes = hashlib.sha256(), hashlib.sha256()
            length_hash, text_hash = self._hashes.setdefault(name, new_hashes)
            for texts in table[name].cast(pa.string()).chunks:
                length_hash.update(pc.binary_length(texts).fill_null(-1).to_numpy().tobytes())
                text_hash.update(_utf8_bytes(texts))
        return self

    def hexdigest(self) -> str:
        """Returns 16 hexadecimal digits."""
        table_hash = hashlib.sha256()
        for name in sorted(self._hashes):
            table_hash.update(name.encode())
            for column_hash in self._hashes[name]:
                table_hash.update(column_hash.digest())
        return table_hash.hexdigest()[:16]


def _utf8_bytes(texts: pa.StringArray) -> memoryview:
    non_null = pc.drop_null(texts)
    _, offset_buffer, text_buffer = non_null.buffers()
    if text_buffer is None or len(non_null) == 0:
        return memoryview(b"")
    offsets = np.frombuffer(offset_buffer, np.int32)[non_null.offset :][: len(non_null) + 1]
    return memoryview(text_buffer)[offsets[0] : offsets[-1]]


def fingerprint(table: pa.Table) -> str:
    """Returns the fingerprint of a table, 16 hexadecimal digits."""
    return Fingerprint().update(table).hexdigest()
