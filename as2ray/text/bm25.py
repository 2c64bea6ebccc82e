"""BM25 scores of any list of texts, and of the candidates of each question in a table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any
from unicodedata import normalize

import bm25s
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ConfigDict, Field, NonNegativeFloat
from pydantic.dataclasses import dataclass as config_dataclass
from scipy import sparse

from as2ray.errors import ConfigError, CorpusError, raise_config_errors
from as2ray.text.term_counts import CollectionStatistics, TermCounts, build_bm25s

GROUP_SIZE = 64
"""Scores of which the best one is taken before the best of all are sorted; partitioning a million
scores takes ten times as long."""


POINTS_PER_LOGIT = np.float32(10.0)
"""BM25 points that count as one unit of log-odds."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A text that matches a query."""

    index: int
    """Index of the text in the list that was indexed."""
    score: float
    """BM25, above 0."""


@config_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class TermConfig:
    """What counts as a term of a text: its lower-cased words of at least two letters, in NFC.

    Of Chinese and Japanese, which have no blanks between words, it is each pair of neighboring
    characters, as with Lucene's `CJKBigramFilter`.
    """

    stop_words: bool = False
    """Whether English stop words (bm25s's list) are removed."""
    lemmas: bool = False
    """Whether English words are replaced by their lemmas ("mice" by "mouse"), as FlexNeuART does
    (Boytsov and Nyberg 2020). simplemma's dictionary decides, without the word's context."""


@raise_config_errors
@config_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BM25(TermConfig):
    """Settings of BM25, in Lucene's variant.

    The defaults are Anserini's, the usual baseline for short passages. On TREC-QA dev they gave a
    MAP of 0.695; Lucene's own 1.2 and 0.75 gave 0.682, and removing stop words cost 0.01.
    """

    k1: NonNegativeFloat = 0.9
    """Term frequency saturation: with a low value, repetitions of a word add little."""
    b: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Strength of the length normalization."""

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
        """Counts the terms of each text, as `TermConfig` says.

        Raises:
            ConfigError: `lemmas` without the package simplemma.
        """
        tokenized = self._bm25s_tokenize(texts, return_ids=True)
        return TermCounts.from_token_ids(tokenized.ids, tokenized.vocab)

    def tokenize(self, texts: Sequence[str]) -> list[list[str]]:
        """Returns the words of each text that count for its score."""
        words: list[list[str]] = self._bm25s_tokenize(texts, return_ids=False)
        return words

    def _bm25s_tokenize(self, texts: Sequence[str], return_ids: bool) -> Any:
        # Some files have accents as characters of their own.
        return bm25s.tokenize(
            [_divide_unspaced(normalize("NFC", text)) for text in texts],
            token_pattern=_TERM,
            stopwords="english" if self.stop_words else None,
            # bm25s calls it once for each distinct word, after the stop words are removed.
            stemmer=_lemmatize_words if self.lemmas else None,
            return_ids=return_ids,
            show_progress=False,
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


def list_probabilities(question: str, candidates: Sequence[str]) -> npt.NDArray[np.float32]:
    """Scores the candidates of one question by their words alone, as a stage before all layers.

    Document frequencies are counted over the candidates, so no collection is needed.

    Returns:
        The logistic function of BM25 / `POINTS_PER_LOGIT`, as if it were a probability: 0.5 without
        a common word. Shape [candidates].
    """
    try:
        scores = BM25().build_index(candidates).get_scores(question)
    except CorpusError:  # no candidate has a word
        scores = np.zeros(len(candidates), np.float32)
    probabilities: npt.NDArray[np.float32] = 1.0 / (1.0 + np.exp(-scores / POINTS_PER_LOGIT))
    return probabilities


@dataclass(frozen=True)
class BM25Index:
    """A searchable list of texts, built by `BM25.build_index`."""

    config: BM25
    retriever: bm25s.BM25

    def search(self, query: str, k: int = 10) -> list[SearchHit]:
        """Returns the k best texts that share a word with the query, best first.

        Of texts with equal scores, the earlier one comes first.
        """
        return select_hits(self.get_scores(query), k)

    def get_scores(self, query: str) -> npt.NDArray[np.float32]:
        """Scores every text for a query, shape [texts]."""
        (words,) = self.config.tokenize([query])
        token_ids = self.retriever.get_tokens_ids(words)
        if not token_ids:
            return np.zeros(self.retriever.scores["num_docs"], np.float32)
        scores: npt.NDArray[np.float32] = self.retriever.get_scores_from_ids(token_ids)
        return scores

    def count_query_terms(self, queries: Sequence[str]) -> sparse.csc_array:
        """Counts the indexed words of each query, shape [queries, words]."""
        token_ids = list(map(self.retriever.get_tokens_ids, self.config.tokenize(queries)))
        return TermCounts.from_token_ids(token_ids, self.retriever.vocab_dict).matrix


def select_hits(scores: npt.NDArray[np.float32], k: int) -> list[SearchHit]:
    """Returns the k highest scores above 0, best first; of equal scores, the earlier one first."""
    num_groups, min_score = len(scores) // GROUP_SIZE, np.float32(0)
    if 0 < k <= num_groups:
        # The k-th best of the groups' best scores is no higher than the k-th best score.
        best = scores[: num_groups * GROUP_SIZE].reshape(GROUP_SIZE, num_groups).max(0)
        min_score = np.partition(best, -k)[-k]
    candidates = np.flatnonzero(scores >= min_score if min_score > 0 else scores > 0)
    order = candidates[np.argsort(-scores[candidates], kind="stable")[:k]]
    return [SearchHit(i, score) for i, score in zip(order.tolist(), scores[order].tolist())]


_MARKS = "\u0591-\u05bd\u05bf\u05c1\u05c2\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
"""Vowel signs of Hebrew, Arabic and the scripts of India, which are no letters to `re`."""

_TERM = rf"(?u)\w[\w{_MARKS}]+"


def _divide_unspaced(text: str) -> str:
    """Writes each run of Chinese or Japanese characters as all pairs of neighbors in it."""
    return text if text.isascii() else _UNSPACED.sub(_write_pairs, text)


def _write_pairs(run: re.Match[str]) -> str:
    return f" {' '.join(first + second for first, second in pairwise(run[0]))} "


_UNSPACED = re.compile(
    "[\u3005\u3007\u3040-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]+"
)
"""Han, hiragana and katakana."""


def _lemmatize_words(words: Sequence[str]) -> list[str]:
    """Returns the lemma of each lower-cased English word; a word without one is its own."""
    try:
        from simplemma import lemmatize
    except ImportError:
        raise ConfigError(
            "lemmas need the package simplemma", fix="pip install 'as2ray[lemmas]'"
        ) from None
    # Names are capitalized in the dictionary.
    return [lemmatize(word, lang="en").lower() for word in words]
