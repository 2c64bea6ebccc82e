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
class Terms:
    """Texts as counts of words, word by word."""

    words: dict[str, int]
    """Number of each word."""
    ends: np.ndarray
    """Where the texts of each word begin and end in `text`, int64, shape [words + 1]."""
    text: np.ndarray
    """Number of each text that has the word, ascending, int32."""
    times: np.ndarray
    """How often it does, int32."""
    lengths: np.ndarray
    """Words of each text, int32, shape [texts]."""

    @classmethod
    def count(cls, ids: Sequence[Sequence[int]], words: dict[str, int]) -> "Terms":
        """Counts texts that are given as numbers of words."""
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        flat = np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum()))
        # One number for a word in a text: sorted, it is word by word and inside it text by text.
        pairs = flat * max(1, len(ids)) + np.repeat(np.arange(len(ids)), lengths)
        found, times = np.unique(pairs, return_counts=True)
        word, text = np.divmod(found, max(1, len(ids)))
        ends = np.concatenate([[0], np.cumsum(np.bincount(word, minlength=len(words)))])
        return cls(words, ends, text.astype(np.int32), times.astype(np.int32), lengths)


@dataclass(frozen=True)
class Statistics:
    """What BM25 knows of a whole corpus."""

    texts: int
    length: int
    """Words of all texts."""
    holders: Counter[str]
    """Texts that have each word."""

    @classmethod
    def of(cls, shards: Iterable[Terms]) -> "Statistics":
        """The sum over shards."""
        texts, length, holders = 0, 0, Counter[str]()
        for terms in shards:
            texts += len(terms.lengths)
            length += int(terms.lengths.sum())
            holders.update(dict(zip(terms.words, np.diff(terms.ends).tolist())))
        return cls(texts, length, holders)


def weighed(terms: Terms, corpus: Statistics, k1: float, b: float) -> bm25s.BM25:
    """A shard as an index of bm25s, in Lucene's variant of BM25.

    Args:
        terms: Of the shard.
        corpus: Of all shards.
        k1: See `BM25`.
        b: See `BM25`.
    """
    holders = np.array([corpus.holders[word] for word in terms.words], np.float64)
    rarity = np.log1p((corpus.texts - holders + 0.5) / (holders + 0.5))
    room = k1 * (1.0 - b + b * terms.lengths / max(1.0, corpus.length / corpus.texts))
    # These can be the largest arrays of all: single precision, and no more of them than needed.
    weights = terms.times.astype(np.float32)
    weights /= room.astype(np.float32)[terms.text] + weights
    weights *= np.repeat(rarity.astype(np.float32), np.diff(terms.ends))
    made = bm25s.BM25(k1=k1, b=b, method="lucene")
    made.scores = {
        "data": weights,
        "indices": terms.text,
        "indptr": terms.ends,
        "num_docs": len(terms.lengths),
    }
    made.vocab_dict = terms.words
    made.unique_token_ids_set = set(terms.words.values())
    made.nonoccurrence_array = None
    return made
