from pathlib import Path

import numpy as np
import pytest
import tiny

from as2ray.data.packed_dataset import Stream
from as2ray.errors import CorpusError
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer
from benchmarks.token_cache import CachedStream, write_tokens


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
    told = {"batch": 16, "max_tokens": 100, "window": 48, "rank": rank, "ranks": 2}
    ours = list(CachedStream(tokens, tokenizer, **told).epoch(1, 3))
    theirs = list(Stream(texts, tokenizer, **told).epoch(1, 3))
    assert len(ours) == len(theirs) > 8
    for one, other in zip(ours, theirs):
        assert (one.step, one.pairs, one.last) == (other.step, other.pairs, other.last)
        for name in ("token_ids", "token_types", "positions", "lengths"):
            np.testing.assert_array_equal(getattr(one.batch, name), getattr(other.batch, name))
        for name, values in other.batch.sequence_data.items():
            np.testing.assert_array_equal(one.batch.sequence_data[name], values)


def test_some_texts_were_cut(corpora, tokenizer):
    texts, _ = corpora
    found = tokenizer.encode(*(texts.table()[name].to_pylist() for name in Stream.texts))
    assert found.lengths.max() == 20


def test_files_of_another_tokenizer_or_of_texts_are_refused(corpora, tokenizer):
    texts, tokens = corpora
    with pytest.raises(CorpusError, match=r"part-000\.parquet: texts"):
        CachedStream(texts, tokenizer, 16)
    longer = PairTokenizer(tokenizer.definition, 30, 6)
    with pytest.raises(CorpusError, match="to other lengths"):
        CachedStream(tokens, longer, 16)


def test_file_is_written_whole_or_not_at_all(corpora, tokenizer, tmp_path):
    broken = tmp_path / "part-000.parquet"
    content = bytearray(Path(corpora[0].paths[0]).read_bytes())
    middle = len(content) // 3
    content[middle : middle + 400] = bytes(400)
    broken.write_bytes(content)
    with pytest.raises((OSError, ValueError)):
        write_tokens(broken, tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob("out/*.parquet"))
