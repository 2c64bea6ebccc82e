"""The epochs of a corpus that was tokenised once: its files hold token ids in place of texts.

Knows Parquet files and the tokenizer's pieces. Must not know models, losses or Ray.

Worth its room where a corpus is read many times: an epoch then costs reading and packing alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.errors import CorpusError
from as2ray.text.packing import Sequences, ragged_arange
from as2ray.text.stream import Stream
from as2ray.text.tokens import Flat, PairTokenizer

TOKENS = {"question": "question_tokens", "candidate": "candidate_tokens"}
"""The column of token ids that stands for each text."""

MADE_BY = b"as2ray.tokenizer"
"""Key of the tokenizer's identity in a file's metadata."""


@dataclass(frozen=True)
class CachedStream(Stream):
    """The same steps as a `Stream` over the texts, from files that `write_tokens` wrote."""

    texts: ClassVar[tuple[str, ...]] = tuple(TOKENS.values())

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = _identity(self.tokenizer)
        for name in self.files.paths:
            if ((pq.read_schema(name).metadata or {}).get(MADE_BY)) != wanted:
                raise CorpusError(
                    f"{Path(name).name}: texts, or tokens of another tokenizer or to other lengths",
                    expected=f"tokens of this tokenizer, max_length={self.tokenizer.max_length}, "
                    f"max_question={self.tokenizer.max_question}",
                    mend="tokenise the corpus again: as2ray.text.cached_stream.write_tokens",
                )

    def tokenise(self, table: pa.Table) -> Sequences:
        """The token sequences of rows of the files."""
        question, candidate = (_flat(table[name]) for name in self.texts)
        return self.tokenizer.assemble(question, candidate)


def write_tokens(path: str | Path, tokenizer: PairTokenizer, folder: str | Path) -> Path:
    """A file of a prepared corpus with token ids in place of its texts, row for row.

    Args:
        path: The file.
        tokenizer: Its lengths are those to which texts are cut.
        folder: Where the file of the same name goes; it appears whole or not at all.
    """
    source, target = pq.ParquetFile(path), Path(folder) / Path(path).name
    part = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    longest = {"question": tokenizer.max_question, "candidate": tokenizer.max_length}
    writer = None
    for number in range(source.num_row_groups):
        table = _tokenised(source.read_row_group(number), tokenizer, longest)
        writer = writer or pq.ParquetWriter(part, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()
        part.rename(target)
    return target


def _tokenised(table: pa.Table, tokenizer: PairTokenizer, longest: Mapping[str, int]) -> pa.Table:
    for text, tokens in TOKENS.items():
        flat = tokenizer.flat(table[text].to_pylist(), longest[text])
        source = np.repeat(flat.starts, flat.lengths) + ragged_arange(flat.lengths)
        ends = np.concatenate([[0], np.cumsum(flat.lengths)]).astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(ends), pa.array(flat.ids[source]))
        table = table.drop_columns(text).append_column(tokens, column)
    return table.replace_schema_metadata({MADE_BY: _identity(tokenizer)})


def _flat(column: pa.ChunkedArray) -> Flat:
    lists = column.combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return Flat(lists.values.to_numpy(), offsets[:-1], np.diff(offsets))


def _identity(tokenizer: PairTokenizer) -> bytes:
    told = f"{tokenizer.max_length} {tokenizer.max_question} {tokenizer.definition}"
    return sha256(told.encode()).hexdigest().encode()
