"""How often each word stands in each text, what a corpus knows of its words, and BM25 of both.

Knows words and arrays, and bm25s's layout of an index. Must not know files, sentences or models.

A corpus may be counted in shards. Their statistics are added up, and each shard is then weighed
with those of the whole corpus: a shard's scores are what they would be in one large index.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import bm25s
import numpy as np


@dataclass(frozen=True)
class TermCounts:
    """Texts as counts of words, word by word."""

    vocabulary: dict[str, int]
    """Number of each word."""
    indptr: np.ndarray
    """Where the texts of each word begin and end in `text`, int64, shape [words + 1]."""
    text_index: np.ndarray
    """Number of each text that has the word, ascending, int32."""
    counts: np.ndarray
    """How often it does, int32."""
    text_lengths: np.ndarray
    """Words of each text, int32, shape [texts]."""

    @classmethod
    def from_token_ids(
        cls, token_ids: Sequence[Sequence[int]], vocabulary: dict[str, int]
    ) -> "TermCounts":
        """Counts texts that are given as numbers of words."""
        lengths = np.fromiter(map(len, token_ids), np.int32, len(token_ids))
        flat = np.fromiter(chain.from_iterable(token_ids), np.int64, int(lengths.sum()))
        # One number for a word in a text: sorted, it is word by word and inside it text by text.
        pairs = flat * max(1, len(token_ids)) + np.repeat(np.arange(len(token_ids)), lengths)
        found, times = np.unique(pairs, return_counts=True)
        word, text = np.divmod(found, max(1, len(token_ids)))
        ends = np.concatenate([[0], np.cumsum(np.bincount(word, minlength=len(vocabulary)))])
        return cls(vocabulary, ends, text.astype(np.int32), times.astype(np.int32), lengths)


@dataclass(frozen=True)
class CollectionStatistics:
    """What BM25 knows of a whole corpus."""

    num_texts: int
    num_words: int
    """Words of all texts."""
    document_frequency: Counter[str]
    """Texts that have each word."""

    @classmethod
    def from_shards(cls, shards: Iterable[TermCounts]) -> "CollectionStatistics":
        """The sum over shards."""
        texts, length, holders = 0, 0, Counter[str]()
        for terms in shards:
            texts += len(terms.text_lengths)
            length += int(terms.text_lengths.sum())
            holders.update(dict(zip(terms.vocabulary, np.diff(terms.indptr).tolist())))
        return cls(texts, length, holders)


def build_bm25s(
    term_counts: TermCounts, statistics: CollectionStatistics, k1: float, b: float
) -> bm25s.BM25:
    """A shard as an index of bm25s, in Lucene's variant of BM25.

    Args:
        terms: Of the shard.
        corpus: Of all shards.
        k1: See `BM25`.
        b: See `BM25`.
    """
    holders = np.array(
        [statistics.document_frequency[word] for word in term_counts.vocabulary], np.float64
    )
    rarity = np.log1p((statistics.num_texts - holders + 0.5) / (holders + 0.5))
    room = k1 * (
        1.0
        - b
        + b * term_counts.text_lengths / max(1.0, statistics.num_words / statistics.num_texts)
    )
    # These can be the largest arrays of all: single precision, and no more of them than needed.
    weights = term_counts.counts.astype(np.float32)
    weights /= room.astype(np.float32)[term_counts.text_index] + weights
    weights *= np.repeat(rarity.astype(np.float32), np.diff(term_counts.indptr))
    made = bm25s.BM25(k1=k1, b=b, method="lucene")
    made.scores = {
        "data": weights,
        "indices": term_counts.text_index,
        "indptr": term_counts.indptr,
        "num_docs": len(term_counts.text_lengths),
    }
    made.vocab_dict = term_counts.vocabulary
    made.unique_token_ids_set = set(term_counts.vocabulary.values())
    made.nonoccurrence_array = None
    return made
