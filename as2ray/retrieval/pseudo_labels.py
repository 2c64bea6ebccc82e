"""Labels that nobody gave: BM25's first is the answer, others of its list are not.

Knows an index and questions. Must not know models or Ray. Mokrii et al. 2021, section 4: the first
of the list is marked relevant, negatives are drawn at random from the top 100.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import pyarrow as pa

from as2ray.errors import ConfigError, CorpusError
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.schema import CANDIDATE_SCHEMA
from as2ray.text.bm25 import SearchHit
from as2ray.text.word_overlap import jaccard, word_set


class Query(NamedTuple):
    """A question to be labelled."""

    id: str
    text: str
    source_sentence: int | None = None
    """Number of the sentence that it was made of; that and those of its text are no answers."""


@dataclass(frozen=True)
class PseudoLabelConfig:
    """How labels are made."""

    depth: int = 100
    """Of BM25's list that negatives are drawn from."""
    num_negatives: int = 5
    """Of each question; the pairwise objective draws one of them an epoch."""
    max_similarity: float | None = None
    """Leave out negatives whose words are this like the positive's (Jaccard, 0 to 1); by default
    only those whose text is the same."""
    seed: int = 0
    """Of the drawing."""

    def __post_init__(self) -> None:
        like = self.max_similarity
        if self.depth < 2 or self.num_negatives < 1 or not (like is None or 0 < like <= 1):
            raise ConfigError(
                f"depth {self.depth}, negatives {self.num_negatives}, near_duplicates {like}"
                "; expected depth >= 2, at least 1 negative, near_duplicates None or above 0 to 1",
            )


@dataclass(frozen=True)
class PseudoLabelResult:
    """What came of the questions."""

    table: pa.Table
    """Candidates, the positive first in each question, with their documents' ids."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Questions without labels, by reason."""


def generate_pseudo_labels(
    index: SentenceIndex, queries: Iterable[Query], config: PseudoLabelConfig | None = None
) -> PseudoLabelResult:
    """A candidates table out of questions that have no labels.

    Args:
        index: Of the sentences.
        queries: Questions of a user, or made of the documents.
        how: How labels are made.

    Raises:
        CorpusError: No question finds a positive and a negative.
    """
    told = config or PseudoLabelConfig()
    rows: list[tuple[str, str, str, str, int, str]] = []
    left_out: Counter[str] = Counter()
    for query in queries:
        hits = index.search(query.text, told.depth + 1)
        if query.source_sentence is not None:
            (own,) = index.texts([query.source_sentence])
            hits = [h for h in hits if index.sentence(h.index).text != own]
        if not hits:
            left_out["finds nothing"] += 1
            continue
        chosen = [hits[0].index, *_sample_negatives(index, hits[: told.depth], told, query.id)]
        if len(chosen) < 2:
            left_out["finds no negative"] += 1
            continue
        rows += _build_rows(index, query, chosen)
    if not rows:
        raise CorpusError(
            f"no question can be labelled: {dict(left_out)}"
            "; expected questions that share words with at least two sentences of the documents",
            fix="give other questions, or more documents",
        )
    schema = CANDIDATE_SCHEMA.append(pa.field("document_id", pa.string()))
    columns = zip(zip(*rows), schema)
    return PseudoLabelResult(
        pa.table([pa.array(c, f.type) for c, f in columns], schema=schema), left_out
    )


def _sample_negatives(
    index: SentenceIndex, hits: list[SearchHit], config: PseudoLabelConfig, question_id: str
) -> Iterator[int]:
    """Some of the list below its first, in the list's order."""
    first, *texts = index.texts([hit.index for hit in hits])
    words, most = word_set(first), config.max_similarity
    pool = [
        hit.index
        for hit, text in zip(hits[1:], texts)
        if text != first and (most is None or jaccard(words, word_set(text)) < most)
    ]
    # By question, so that leaving one out changes no other's labels.
    drawn = set(
        Random(f"{config.seed} {question_id}").sample(pool, min(config.num_negatives, len(pool)))
    )
    return (number for number in pool if number in drawn)


def _build_rows(
    index: SentenceIndex, query: Query, sentence_numbers: list[int]
) -> list[tuple[str, str, str, str, int, str]]:
    sentences = [index.sentence(number) for number in sentence_numbers]
    return [
        (query.id, query.text, f"{query.id}-{number}", s.text, int(place == 0), s.document_id)
        for place, (number, s) in enumerate(zip(sentence_numbers, sentences))
    ]
