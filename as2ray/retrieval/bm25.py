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

from as2ray.errors import CorpusError, RecipeError
from as2ray.retrieval.terms import Statistics, Terms, weighed


@dataclass(frozen=True, slots=True)
class Hit:
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
            raise RecipeError(
                f"k1 {self.k1}, b {self.b}",
                expected="k1 of 0 or more, b from 0 to 1",
                mend="correct them",
            )

    def index(self, texts: Sequence[str]) -> "Index":
        """An index of the texts.

        Raises:
            CorpusError: No texts, or none that has a word.
        """
        return self.index_of(self.terms(texts))

    def index_of(self, terms: Terms) -> "Index":
        """As `index`, of texts that are counted already."""
        if not len(terms.text):
            raise CorpusError(
                f"{len(terms.lengths):,} texts without a word",
                expected="at least one word of two letters",
                mend="check the source",
            )
        return Index(self, weighed(terms, Statistics.of([terms]), self.k1, self.b))

    def terms(self, texts: Sequence[str]) -> Terms:
        """How often each text has each of its words: lower-cased, of two letters and more."""
        found = self._tokenised(texts, return_ids=True)
        return Terms.count(found.ids, found.vocab)

    def words(self, texts: Sequence[str]) -> list[list[str]]:
        """The words of each text that count."""
        words: list[list[str]] = self._tokenised(texts, return_ids=False)
        return words

    def _tokenised(self, texts: Sequence[str], return_ids: bool) -> Any:
        stop_words = "english" if self.stop_words else None
        return bm25s.tokenize(
            list(texts), stopwords=stop_words, return_ids=return_ids, show_progress=False
        )

    def scores_within(self, table: pa.Table, terms: Terms | None = None) -> npt.NDArray[np.float32]:
        """BM25 of each row's candidate for its question, shape [rows].

        Every candidate of the table counts as a text, so that a word's rarity is judged on the
        whole table and not on one question's few candidates.

        Args:
            table: With the columns `question` and `candidate`.
            terms: Of its candidates, where they are counted already.

        Raises:
            CorpusError: A table without a word.
        """
        counted = self.terms(table["candidate"].to_pylist()) if terms is None else terms
        index = self.index_of(counted)
        questions = table["question"].combine_chunks().dictionary_encode()
        asked = index.counts(questions.dictionary.to_pylist())[questions.indices.to_numpy()]
        scores: npt.NDArray[np.float32] = index.matrix().multiply(asked).sum(axis=1)
        return scores


@dataclass(frozen=True)
class Index:
    """Texts made searchable; comes from `BM25.index`."""

    settings: BM25
    """How the texts were read."""
    retriever: bm25s.BM25
    """The index of bm25s."""

    def top(self, query: str, k: int = 10) -> list[Hit]:
        """The k best texts that share a word with the query, best first, earlier texts first."""
        return best(self.scores(query), k)

    def scores(self, query: str) -> npt.NDArray[np.float32]:
        """BM25 of every text for a query, shape [texts]."""
        (words,) = self.settings.words([query])
        known = self.retriever.get_tokens_ids(words)
        if not known:
            return np.zeros(self.retriever.scores["num_docs"], np.float32)
        scores: npt.NDArray[np.float32] = self.retriever.get_scores_from_ids(known)
        return scores

    def matrix(self) -> sparse.csc_array:
        """What each word adds to each text's score, shape [texts, words]."""
        parts = self.retriever.scores
        shape = (parts["num_docs"], len(parts["indptr"]) - 1)
        return sparse.csc_array((parts["data"], parts["indices"], parts["indptr"]), shape)

    def counts(self, queries: Sequence[str]) -> sparse.csr_array:
        """How often each query has each word of the index, shape [queries, words]."""
        known = [self.retriever.get_tokens_ids(w) for w in self.settings.words(queries)]
        ends = np.cumsum([0, *map(len, known)])
        words = np.array([i for ids in known for i in ids], np.int32)
        width = len(self.retriever.scores["indptr"]) - 1
        return sparse.csr_array((np.ones(len(words), np.float32), words, ends), (len(known), width))


def best(scores: npt.NDArray[np.float32], k: int) -> list[Hit]:
    """The k highest of the scores above 0, best first, of equals the earlier."""
    floor = np.partition(scores, -k)[-k] if 0 < k < len(scores) else 0.0
    found = np.flatnonzero((scores >= floor) & (scores > 0))
    order = found[np.argsort(-scores[found], kind="stable")[:k]]
    return [Hit(i, score) for i, score in zip(order.tolist(), scores[order].tolist())]
