"""BM25 scores of any list of texts, and of the candidates of each question in a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import bm25s
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ConfigDict, Field, NonNegativeFloat
from pydantic.dataclasses import dataclass as config_dataclass
from scipy import sparse

from as2ray.errors import CorpusError
from as2ray.text.term_counts import CollectionStatistics, TermCounts, build_bm25s

ROUNDING = 1 - 1e-5
"""Factor of a bound of scores that are summed in another order."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A text that matches a query."""

    index: int
    """Index of the text in the list that was indexed."""
    score: float
    """BM25, above 0."""


@config_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BM25:
    """Settings of BM25, in Lucene's variant.

    The defaults are Anserini's, the usual baseline for short passages. On TREC-QA dev they gave a
    MAP of 0.695; Lucene's own 1.2 and 0.75 gave 0.682, and removing stop words cost 0.01.
    """

    k1: NonNegativeFloat = 0.9
    """Term frequency saturation: with a low value, repetitions of a word add little."""
    b: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Strength of the length normalization."""
    stop_words: bool = False
    """Whether English stop words are removed."""

    def build_index(self, texts: Sequence[str]) -> "BM25Index":
        """Builds an index of the texts.

        Raises:
            CorpusError: There are no texts, or none of them has a word.
        """
        return self.build_from_counts(self.count_terms(texts))

    def build_from_counts(self, term_counts: TermCounts) -> "BM25Index":
        """Builds an index of texts whose words are already counted; see `build_index`."""
        if not term_counts.matrix.nnz:
            raise CorpusError(
                f"{term_counts.matrix.shape[0]:,} texts without a word of at least two letters",
                fix="check the source",
            )
        statistics = CollectionStatistics.from_shards([term_counts])
        return BM25Index(self, build_bm25s(term_counts, statistics, self.k1, self.b))

    def count_terms(self, texts: Sequence[str]) -> TermCounts:
        """Counts the words of each text: lower-cased, with at least two letters."""
        tokenized = self._bm25s_tokenize(texts, return_ids=True)
        return TermCounts.from_token_ids(tokenized.ids, tokenized.vocab)

    def tokenize(self, texts: Sequence[str]) -> list[list[str]]:
        """Returns the words of each text that count for its score."""
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
        """Scores each row's candidate for its question, shape [rows].

        Document frequencies are counted over all candidates of the table, not over the few
        candidates of one question.

        Args:
            table: A table with the columns `question` and `candidate`.
            term_counts: Counts of its candidates, if they are already known.

        Raises:
            CorpusError: The table has no words.
        """
        if term_counts is None:
            term_counts = self.count_terms(table["candidate"].to_pylist())
        index = self.build_from_counts(term_counts)
        questions = table["question"].combine_chunks().dictionary_encode()
        query_counts = index.count_query_terms(questions.dictionary.to_pylist())
        row_counts = query_counts.astype(np.float32).tocsr()[questions.indices.to_numpy()]
        arrays = tuple(index.retriever.scores[name] for name in ("data", "indices", "indptr"))
        word_scores = sparse.csc_array(arrays, term_counts.matrix.shape)
        scores: npt.NDArray[np.float32] = word_scores.multiply(row_counts).sum(axis=1)
        return scores


@dataclass(frozen=True)
class BM25Index:
    """A searchable list of texts, built by `BM25.build_index`."""

    config: BM25
    retriever: bm25s.BM25

    def search(self, query: str, k: int = 10) -> list[SearchHit]:
        """Returns the k best texts that share a word with the query, best first.

        Of texts with equal scores, the earlier one comes first. Texts that cannot be among the k
        best are not scored: the words that add most come first, and as soon as the others together
        add less than the k-th best score, they find no more texts (MaxScore, Turtle and Flood
        1995).
        """
        token_ids = self._token_ids(query)
        rows = self._find_rows(token_ids, k) if k > 0 else np.zeros(0, np.int32)
        scores = self._score_rows(token_ids, rows)
        order = np.lexsort((rows, -scores))[:k]
        return list(map(SearchHit, rows[order].tolist(), scores[order].tolist()))

    def get_scores(self, query: str) -> npt.NDArray[np.float32]:
        """Scores every text for a query, shape [texts]."""
        if not (token_ids := self._token_ids(query)):
            return np.zeros(self.retriever.scores["num_docs"], np.float32)
        scores: npt.NDArray[np.float32] = self.retriever.get_scores_from_ids(token_ids)
        return scores

    def score_rows(self, query: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Scores some texts for a query, shape [rows]."""
        return self._score_rows(self._token_ids(query), rows)

    def _token_ids(self, query: str) -> list[int]:
        (words,) = self.config.tokenize([query])
        token_ids: list[int] = self.retriever.get_tokens_ids(words)
        return token_ids

    def _postings(self, token_id: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Returns the texts with a word, ascending, and what it adds to their scores."""
        rows, weights, bounds = self._arrays
        start, end = bounds[token_id], bounds[token_id + 1]
        return rows[start:end], weights[start:end]

    @cached_property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        # A slice of a plain array takes a tenth of the time of a memory map's.
        return tuple(np.asarray(self.retriever.scores[n]) for n in ("indices", "data", "indptr"))

    def _find_rows(self, token_ids: Sequence[int], k: int) -> npt.NDArray[np.int32]:
        """Returns texts among which are the k best."""
        counts = Counter(token_ids)
        bounds = {t: counts[t] * float(self._postings(t)[1].max(initial=0.0)) for t in counts}
        terms = sorted(counts, key=bounds.__getitem__, reverse=True)
        # What all words from each one on add at most.
        rest = np.cumsum([bounds[t] for t in reversed(terms)])[::-1]
        sums = np.zeros(self.retriever.scores["num_docs"], np.float32)
        found, kth_best = np.zeros(0, np.int32), 0.0
        for term, max_rest in zip(terms, rest):
            rows, weights = self._postings(term)
            if len(found) >= k:
                kth_best = ROUNDING * float(np.partition(sums[found], -k)[-k])
                found = found[sums[found] + max_rest >= kth_best]
            if max_rest >= kth_best:
                found = np.concatenate([found, rows[sums[rows] == 0]])
                sums[rows] += counts[term] * weights
            else:
                sums[found] += counts[term] * _look_up(rows, weights, found)
        return found

    def _score_rows(
        self, token_ids: Sequence[int], rows: npt.NDArray[Any]
    ) -> npt.NDArray[np.float32]:
        scores = np.zeros(len(rows), np.float32)
        for token_id in token_ids:  # The order of `get_scores`, so that sums round alike.
            scores += _look_up(*self._postings(token_id), rows)
        return scores

    def count_query_terms(self, queries: Sequence[str]) -> sparse.csc_array:
        """Counts the indexed words of each query, shape [queries, words]."""
        token_ids = list(map(self.retriever.get_tokens_ids, self.config.tokenize(queries)))
        return TermCounts.from_token_ids(token_ids, self.retriever.vocab_dict).matrix


def _look_up(
    rows: npt.NDArray[np.int32], weights: npt.NDArray[np.float32], wanted: npt.NDArray[Any]
) -> npt.NDArray[np.float32]:
    """Returns the weight of each wanted row; 0 for those that are not among the ascending rows."""
    # Numbers of another kind would make a copy of all rows.
    positions = np.searchsorted(rows, wanted.astype(rows.dtype)).clip(max=len(rows) - 1)
    return np.where(rows[positions] == wanted, weights[positions], np.float32(0))
