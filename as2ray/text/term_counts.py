"""Counts of words in texts, statistics of a collection, and BM25 weights computed from both.

A collection may be counted in shards. The statistics of the shards are added up, and each shard is
then weighted with the statistics of the whole collection. A text in a shard therefore has the same
score as in one large index.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import bm25s
import numpy as np
from scipy import sparse


@dataclass(frozen=True)
class TermCounts:
    """Word counts of texts."""

    vocabulary: dict[str, int]
    """Id of each word."""
    matrix: sparse.csc_array
    """How often each text contains each word, int32, shape [texts, words]."""

    @classmethod
    def from_token_ids(
        cls, token_ids: Sequence[Sequence[int]], vocabulary: dict[str, int]
    ) -> "TermCounts":
        """Counts the word ids of each text."""
        lengths = np.fromiter(map(len, token_ids), np.int32, len(token_ids))
        words = np.fromiter(chain.from_iterable(token_ids), np.int32, int(lengths.sum()))
        texts = np.repeat(np.arange(len(token_ids), dtype=np.int32), lengths)
        ones, shape = np.ones(len(words), np.int32), (len(token_ids), len(vocabulary))
        # The conversion to CSC adds up the ones of a word that a text contains several times.
        return cls(vocabulary, sparse.coo_array((ones, (texts, words)), shape).tocsc())


@dataclass(frozen=True)
class CollectionStatistics:
    """Statistics of a whole collection that BM25 needs."""

    num_texts: int
    num_words: int
    """Sum of the lengths of all texts."""
    document_frequency: Counter[str]
    """Number of texts that contain each word."""

    @classmethod
    def from_shards(cls, shards: Iterable[TermCounts]) -> "CollectionStatistics":
        """Adds up the statistics of shards."""
        num_texts, num_words, document_frequency = 0, 0, Counter[str]()
        for shard in shards:
            num_texts += shard.matrix.shape[0]
            num_words += int(shard.matrix.sum())
            texts_per_word = np.diff(shard.matrix.indptr).tolist()
            document_frequency.update(dict(zip(shard.vocabulary, texts_per_word)))
        return cls(num_texts, num_words, document_frequency)


def build_bm25s(
    term_counts: TermCounts, statistics: CollectionStatistics, k1: float, b: float
) -> bm25s.BM25:
    """Builds an index of bm25s from the counts of a shard, in Lucene's variant of BM25.

    Args:
        term_counts: Counts of the shard.
        statistics: Statistics of all shards together.
        k1: See `BM25`.
        b: See `BM25`.
    """
    counts, vocabulary = term_counts.matrix, term_counts.vocabulary
    frequency = np.array([statistics.document_frequency[word] for word in vocabulary], np.float64)
    idf = np.log1p((statistics.num_texts - frequency + 0.5) / (frequency + 0.5))
    mean_length = max(1.0, statistics.num_words / statistics.num_texts)
    length_norm = k1 * (1.0 - b + b * counts.sum(axis=1) / mean_length)
    # The weights can be the largest array of all: float32, changed in place.
    weights = counts.data.astype(np.float32)
    weights /= length_norm.astype(np.float32)[counts.indices] + weights
    weights *= np.repeat(idf.astype(np.float32), np.diff(counts.indptr))
    retriever = bm25s.BM25(k1=k1, b=b, method="lucene")
    retriever.scores = {
        "data": weights,
        "indices": counts.indices,
        "indptr": counts.indptr.astype(np.int64),
        "num_docs": counts.shape[0],
    }
    retriever.vocab_dict = vocabulary
    retriever.unique_token_ids_set = set(vocabulary.values())
    retriever.nonoccurrence_array = None
    return retriever
