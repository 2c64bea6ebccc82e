"""A corpus that was tokenized once: its Parquet files hold token ids instead of texts."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.data.pair_reader import PairReader
from as2ray.errors import CorpusError
from as2ray.tables.atomic import atomic_file
from as2ray.text.packing import TokenSequences, ragged_arange
from as2ray.text.tokenization import PairTokenizer, TokenizedTexts

TOKEN_COLUMNS = {"question": "question_tokens", "candidate": "candidate_tokens"}

METADATA_KEY = b"as2ray.tokenizer"
"""Key of the tokenizer's hash in the metadata of a file."""


@dataclass(frozen=True)
class TokenCacheReader(PairReader):
    """Reads the pairs of files that `write_tokens` wrote."""

    text_columns: ClassVar[tuple[str, ...]] = tuple(TOKEN_COLUMNS.values())

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in self.files.paths:
            metadata = pq.read_schema(path).metadata or {}
            if metadata.get(METADATA_KEY) != _tokenizer_hash(self.tokenizer):
                raise CorpusError(
                    f"{Path(path).name} holds texts, or tokens of another tokenizer or with other "
                    f"maximum lengths than max_length={self.tokenizer.max_length} and "
                    f"max_question_length={self.tokenizer.max_question_length}",
                    fix="tokenize the corpus again: benchmarks.token_cache.write_tokens",
                )

    def tokenize(self, table: pa.Table) -> TokenSequences:
        """Joins the stored token ids to token sequences."""
        columns = [table[name].combine_chunks() for name in self.text_columns]
        offsets = [column.offsets.to_numpy().astype(np.int64) for column in columns]
        texts = (
            TokenizedTexts(column.values.to_numpy(), ends[:-1], np.diff(ends))
            for column, ends in zip(columns, offsets)
        )
        return self.tokenizer.join_pairs(*texts)


def write_tokens(path: str | Path, tokenizer: PairTokenizer, folder: str | Path) -> Path:
    """Writes a copy of a Parquet file with token ids instead of texts, row by row.

    One row group at a time is in memory.

    Args:
        path: A file of a candidates table.
        tokenizer: Tokenizes the texts.
        folder: Where the copy is written, under the same name.

    Returns:
        The path of the copy.
    """
    source, target = pq.ParquetFile(path), Path(folder) / Path(path).name
    target.parent.mkdir(parents=True, exist_ok=True)
    schema = _tokenize(source.schema_arrow.empty_table(), tokenizer).schema
    with (
        atomic_file(target) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for group in range(source.num_row_groups):
            writer.write_table(_tokenize(source.read_row_group(group), tokenizer))
    return target


def _tokenize(table: pa.Table, tokenizer: PairTokenizer) -> pa.Table:
    tokenize = {
        "question": tokenizer.tokenize_questions,
        "candidate": tokenizer.tokenize_candidates,
    }
    for name, tokenize_column in tokenize.items():
        texts = tokenize_column(table[name].to_pylist())
        indices = np.repeat(texts.starts, texts.lengths) + ragged_arange(texts.lengths)
        offsets = pa.array(np.concatenate([[0], np.cumsum(texts.lengths)]).astype(np.int32))
        tokens = pa.ListArray.from_arrays(offsets, pa.array(texts.token_ids[indices]))
        table = table.drop_columns(name).append_column(TOKEN_COLUMNS[name], tokens)
    return table.replace_schema_metadata({METADATA_KEY: _tokenizer_hash(tokenizer)})


def _tokenizer_hash(tokenizer: PairTokenizer) -> bytes:
    settings = f"{tokenizer.max_length} {tokenizer.max_question_length} {tokenizer.tokenizer_json}"
    return sha256(settings.encode()).hexdigest().encode()
