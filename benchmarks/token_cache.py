"""A corpus that was tokenized once: its files hold token ids in place of texts."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.data.pair_reader import PairReader
from as2ray.errors import CorpusError
from as2ray.text.packing import TokenSequences, ragged_arange
from as2ray.text.tokenization import PairTokenizer, TokenizedTexts

TOKENS = {"question": "question_tokens", "candidate": "candidate_tokens"}
KEY = b"as2ray.tokenizer"


@dataclass(frozen=True)
class TokenCacheReader(PairReader):
    """Reads the pairs of files that `write_tokens` wrote."""

    text_columns: ClassVar[tuple[str, ...]] = tuple(TOKENS.values())

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in self.files.paths:
            if (pq.read_schema(path).metadata or {}).get(KEY) != _tokenizer_hash(self.tokenizer):
                raise CorpusError(
                    f"{Path(path).name}: texts, or tokens of another tokenizer or to other lengths"
                    f"; expected tokens of this tokenizer, max_length={self.tokenizer.max_length}, "
                    f"max_question_length={self.tokenizer.max_question_length}",
                    fix="tokenize the corpus again: as2ray.text.cached_stream.write_tokens",
                )

    def tokenize(self, table: pa.Table) -> TokenSequences:
        """The token sequences of rows of the files."""
        columns = [table[name].combine_chunks() for name in self.text_columns]
        offsets = [column.offsets.to_numpy().astype(np.int64) for column in columns]
        texts = (
            TokenizedTexts(c.values.to_numpy(), o[:-1], np.diff(o))
            for c, o in zip(columns, offsets)
        )
        return self.tokenizer.join_pairs(*texts)


def write_tokens(path: str | Path, tokenizer: PairTokenizer, folder: str | Path) -> Path:
    """Writes a Parquet file with token ids in place of its texts, row for row."""
    source, target = pq.ParquetFile(path), Path(folder) / Path(path).name
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    groups = (source.read_row_group(n) for n in range(source.num_row_groups))
    tables = [_tokenize(group, tokenizer) for group in groups]
    if tables:
        pq.write_table(pa.concat_tables(tables), part, compression="zstd")
        part.rename(target)
    return target


def _tokenize(table: pa.Table, tokenizer: PairTokenizer) -> pa.Table:
    for name, longest in (
        ("question", tokenizer.max_question_length),
        ("candidate", tokenizer.max_length),
    ):
        flat = tokenizer.tokenize_texts(table[name].to_pylist(), longest)
        source = np.repeat(flat.starts, flat.lengths) + ragged_arange(flat.lengths)
        ends = pa.array(np.concatenate([[0], np.cumsum(flat.lengths)]).astype(np.int32))
        tokens = pa.ListArray.from_arrays(ends, pa.array(flat.token_ids[source]))
        table = table.drop_columns(name).append_column(TOKENS[name], tokens)
    return table.replace_schema_metadata({KEY: _tokenizer_hash(tokenizer)})


def _tokenizer_hash(tokenizer: PairTokenizer) -> bytes:
    definition = (
        f"{tokenizer.max_length} {tokenizer.max_question_length} {tokenizer.tokenizer_json}"
    )
    return sha256(definition.encode()).hexdigest().encode()
