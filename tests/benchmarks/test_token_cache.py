from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.errors import CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer
from benchmarks.token_cache import TokenCacheReader, write_tokens


@pytest.fixture(scope="module")
def tokenizer(published):
    return PairTokenizer(published("bert").backend_tokenizer.to_str(), 20, 6)


@pytest.fixture(scope="module")
def corpora(tokenizer, tmp_path_factory):
    """The same corpus as texts and as tokens."""
    texts, tokens = (tmp_path_factory.mktemp(name) for name in ("texts", "tokens"))
    files = ParquetTable.open(tiny.write_corpus(texts, tiny.candidates(40), files=3, row_group=20))
    for path in files.paths:
        write_tokens(path, tokenizer, tokens)
    return files, ParquetTable.open(tokens)


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_give_the_batches_that_texts_give(corpora, tokenizer, rank):
    texts, tokens = corpora
    cached, tokenized = (
        list(PackedDataset(reader, 16, 100, 0, rank, 2, shuffle_window=48).epoch(1, 3))
        for reader in (TokenCacheReader(tokens, tokenizer), PairReader(texts, tokenizer))
    )
    assert len(cached) == len(tokenized) > 8
    for micro, expected in zip(cached, tokenized):
        assert (micro.step, micro.num_examples) == (expected.step, expected.num_examples)
        assert micro.is_last == expected.is_last
        for name in ("token_ids", "token_types", "positions", "lengths"):
            values = getattr(expected.batch, name)
            np.testing.assert_array_equal(getattr(micro.batch, name), values)
        for name, values in expected.batch.sequence_data.items():
            np.testing.assert_array_equal(micro.batch.sequence_data[name], values)


def test_some_texts_were_cut(corpora, tokenizer):
    texts, _ = corpora
    table = texts.to_table()
    sequences = tokenizer.encode(*(table[name].to_pylist() for name in PairReader.text_columns))
    assert sequences.lengths.max() == 20


def test_token_files_have_the_row_groups_of_the_text_files(corpora):
    texts, tokens = corpora
    for text_path, token_path in zip(texts.paths, tokens.paths):
        assert row_group_sizes(token_path) == row_group_sizes(text_path)
    assert len(row_group_sizes(tokens.paths[0])) > 1


def row_group_sizes(path):
    metadata = pq.read_metadata(path)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def test_file_without_rows_becomes_a_file_without_rows(tokenizer, tmp_path):
    texts = tiny.write_corpus(tmp_path / "texts", tiny.candidates(2).slice(0, 0))
    path = write_tokens(texts / "part-000.parquet", tokenizer, tmp_path / "tokens")
    assert pq.read_table(path).num_rows == 0


def test_files_of_another_tokenizer_or_of_texts_are_refused(corpora, tokenizer):
    texts, tokens = corpora
    with pytest.raises(CorpusError, match=r"part-000\.parquet holds texts"):
        TokenCacheReader(texts, tokenizer)
    longer = PairTokenizer(tokenizer.tokenizer_json, 30, 6)
    with pytest.raises(CorpusError, match="other maximum lengths"):
        TokenCacheReader(tokens, longer)


def test_file_is_written_whole_or_not_at_all(corpora, tokenizer, tmp_path):
    broken = tmp_path / "part-000.parquet"
    content = bytearray(Path(corpora[0].paths[0]).read_bytes())
    middle = len(content) // 3
    content[middle : middle + 400] = bytes(400)
    broken.write_bytes(content)
    with pytest.raises((OSError, ValueError)):
        write_tokens(broken, tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob("out/*"))
