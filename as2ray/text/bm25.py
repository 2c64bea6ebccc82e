"""Keyword scores: BM25 over any list of texts, and inside the questions of a candidates table.

Knows texts and candidates tables, and stands on bm25s. Must not know models, measures or Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bm25s
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy import sparse

from as2ray.errors import ConfigError, CorpusError
from as2ray.text.term_counts import CollectionStatistics, TermCounts, build_bm25s


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One text that a search found."""

    index: int
    """Position in the list of texts that was indexed."""
    score: float
    """BM25, above 0."""


@dataclass(frozen=True)
class BM25:
    """Settings of the keyword ranker, in Lucene's variant of BM25.

    The defaults are Anserini's, the usual baseline for short passages. On TREC-QA dev they gave a
    MAP of 0.695, Lucene's own 1.2 and 0.75 gave 0.682, and leaving out stop words 0.01 less.
    """

    k1: float = 0.9
    """How soon a repeated word stops to count."""
    b: float = 0.4
    """How much a long text is marked down, 0 to 1."""
    stop_words: bool = False
    """Whether English stop words are left out."""

    def __post_init__(self) -> None:
        if not (self.k1 >= 0 and 0 <= self.b <= 1):
            raise ConfigError(
                f"k1 {self.k1}, b {self.b}; expected k1 of 0 or more, b from 0 to 1",
            )

    def build_index(self, texts: Sequence[str]) -> "BM25Index":
        """An index of the texts.

        Raises:
            CorpusError: No texts, or none that has a word.
        """
        return self.build_from_counts(self.count_terms(texts))

    def build_from_counts(self, term_counts: TermCounts) -> "BM25Index":
        """As `index`, of texts that are counted already."""
        if not len(term_counts.text_index):
            raise CorpusError(
                f"{len(term_counts.text_lengths):,} texts without a word"
                "; expected at least one word of two letters",
                fix="check the source",
            )
        return BM25Index(
            self,
            build_bm25s(
                term_counts, CollectionStatistics.from_shards([term_counts]), self.k1, self.b
            ),
        )

    def count_terms(self, texts: Sequence[str]) -> TermCounts:
        """How often each text has each of its words: lower-cased, of two letters and more."""
        found = self._bm25s_tokenize(texts, return_ids=True)
        return TermCounts.from_token_ids(found.ids, found.vocab)

    def tokenize(self, texts: Sequence[str]) -> list[list[str]]:
        """The words of each text that count."""
        words: list[list[str]] = self._bm25s_tokenize(texts, return_ids=False)
        return words

    def _bm25s_tokenize(self, texts: Sequence[str], return_ids: bool) -> Any:
        stop_words = "english" if self.stop_words else None
        return bm25s.tokenize(
            list(texts), stopwords=stop_words, return_ids=return_ids, show_progress=False
        )

    def score_candidates(
        self, table: pa.Table, term_counts: TermCounts | None = None
    ) -> npt.NDArray[np.float32]:
        """BM25 of each row's candidate for its question, shape [rows].

        Every candidate of the table counts as a text, so that a word's rarity is judged on the
        whole table and not on one question's few candidates.

        Args:
            table: With the columns `question` and `candidate`.
            terms: Of its candidates, where they are counted already.

        Raises:
            CorpusError: A table without a word.
        """
        counted = (
            self.count_terms(table["candidate"].to_pylist()) if term_counts is None else term_counts
        )
        index = self.build_from_counts(counted)
        questions = table["question"].combine_chunks().dictionary_encode()
        asked = index.count_query_terms(questions.dictionary.to_pylist())[
            questions.indices.to_numpy()
        ]
        scores: npt.NDArray[np.float32] = index.build_score_matrix().multiply(asked).sum(axis=1)
        return scores


@dataclass(frozen=True)
class BM25Index:
    """Texts made searchable; comes from `BM25.index`."""

    config: BM25
    """How the texts were read."""
    retriever: bm25s.BM25
    """The index of bm25s."""

    def search(self, query: str, k: int = 10) -> list[SearchHit]:
        """The k best texts that share a word with the query, best first, earlier texts first."""
        return top_hits(self.get_scores(query), k)

    def get_scores(self, query: str) -> npt.NDArray[np.float32]:
        """BM25 of every text for a query, shape [texts]."""
        (words,) = self.config.tokenize([query])
        known = self.retriever.get_tokens_ids(words)
        if not known:
            return np.zeros(self.retriever.scores["num_docs"], np.float32)
        scores: npt.NDArray[np.float32] = self.retriever.get_scores_from_ids(known)
        return scores

    def build_score_matrix(self) -> sparse.csc_array:
        """What each word adds to each text's score, shape [texts, words]."""
        parts = self.retriever.scores
        shape = (parts["num_docs"], len(parts["indptr"]) - 1)
        return sparse.csc_array((parts["data"], parts["indices"], parts["indptr"]), shape)

    def count_query_terms(self, queries: Sequence[str]) -> sparse.csr_array:
        """How often each query has each word of the index, shape [queries, words]."""
        known = [self.retriever.get_tokens_ids(w) for w in self.config.tokenize(queries)]
        ends = np.cumsum([0, *map(len, known)])
        words = np.array([i for ids in known for i in ids], np.int32)
        width = len(self.retriever.scores["indptr"]) - 1
        return sparse.csr_array((np.ones(len(words), np.float32), words, ends), (len(known), width))


def top_hits(scores: npt.NDArray[np.float32], k: int) -> list[SearchHit]:
    """The k highest of the scores above 0, best first, of equals the earlier."""
    floor = np.partition(scores, -k)[-k] if 0 < k < len(scores) else 0.0
    found = np.flatnonzero((scores >= floor) & (scores > 0))
    order = found[np.argsort(-scores[found], kind="stable")[:k]]
    return [SearchHit(i, score) for i, score in zip(order.tolist(), scores[order].tolist())]
