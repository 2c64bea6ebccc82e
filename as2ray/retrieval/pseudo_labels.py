"""Generates pseudo-labels from BM25: its first sentence is the positive, others are negatives.

The method is that of Mokrii et al. 2021, section 4: the first of BM25's list is marked relevant,
and negatives are sampled uniformly from the top 100.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Annotated, NamedTuple

import pyarrow as pa
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.errors import CorpusError
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.schema import CANDIDATE_SCHEMA, MAX_TEXT_CHARS, from_rows
from as2ray.text.bm25 import SearchHit
from as2ray.text.word_overlap import jaccard, word_set


class Query(NamedTuple):
    """A question without labels."""

    id: str
    text: str
    source_sentence: int | None = None
    """Index of the sentence that the question was generated from.

    That sentence, and every other with the same text, is no candidate.
    """


@config_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PseudoLabelConfig:
    """How pseudo-labels are generated."""

    depth: Annotated[int, Field(ge=2)] = 100
    """Length of BM25's list that negatives are sampled from."""
    num_negatives: PositiveInt = 5
    """Negatives of each question; a pairwise loss samples one of them in every epoch."""
    max_similarity: Annotated[float, Field(gt=0, le=1)] | None = None
    """Candidates with this Jaccard similarity to the positive, or more, are no negatives.

    By default only candidates with the same text are excluded.
    """
    seed: int = 0
    """Seed of the sampling of negatives."""


@dataclass(frozen=True)
class PseudoLabelResult:
    """A table of pseudo-labels."""

    table: pa.Table
    """Candidates, the positive of each question first, with the ids of their documents."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of questions without labels, by reason."""


def merge_pseudo_labels(results: Sequence[PseudoLabelResult]) -> PseudoLabelResult:
    """Merges the labels of several groups of questions, in order.

    Raises:
        CorpusError: No question has a positive and a negative.
    """
    skipped: Counter[str] = Counter()
    for result in results:
        skipped.update(result.skipped)
    table = pa.concat_tables([result.table for result in results])
    if not table.num_rows:
        raise CorpusError(
            f"no question shares words with two sentences of the documents: {dict(skipped)}",
            fix="give other questions, or more documents",
        )
    return PseudoLabelResult(table, skipped)


def label_queries(
    index: SentenceIndex, queries: Iterable[Query], config: PseudoLabelConfig
) -> PseudoLabelResult:
    """Labels questions; a question's labels do not depend on the others.

    Args:
        index: Sentences that become candidates.
        queries: Questions of users, or generated from the documents.
        config: How pseudo-labels are generated.
    """
    rows: list[tuple[str, str, str, str, int, str]] = []
    skipped: Counter[str] = Counter()
    for query in queries:
        hits = index.search(query.text, config.depth + 1)
        if query.source_sentence is not None:
            (source_text,) = index.texts([query.source_sentence])
            hits = [hit for hit in hits if index.sentence(hit.index).text != source_text]
        negatives = _sample_negatives(index, hits[: config.depth], config, query.id) if hits else []
        if not negatives:
            skipped["finds no negative" if hits else "finds nothing"] += 1
            continue
        for rank, sentence_index in enumerate([hits[0].index, *negatives]):
            sentence = index.sentence(sentence_index)
            text = sentence.text[:MAX_TEXT_CHARS]
            candidate = (f"{query.id}-{sentence_index}", text, int(rank == 0))
            rows.append((query.id, query.text, *candidate, sentence.document_id))
    schema = CANDIDATE_SCHEMA.append(pa.field("document_id", pa.string()))
    return PseudoLabelResult(from_rows(rows, schema), skipped)


def _sample_negatives(
    index: SentenceIndex, hits: list[SearchHit], config: PseudoLabelConfig, question_id: str
) -> list[int]:
    """Samples sentences from the list below its first, and returns them in the list's order."""
    first_text, *texts = index.texts([hit.index for hit in hits])
    first_words, max_similarity = word_set(first_text), config.max_similarity or inf
    pool = [
        hit.index
        for hit, text in zip(hits[1:], texts)
        if text != first_text and jaccard(first_words, word_set(text)) < max_similarity
    ]
    # Seeded by question, so that a question's labels do not depend on the other questions.
    random = Random(f"{config.seed} {question_id}")
    sampled = set(random.sample(pool, min(config.num_negatives, len(pool))))
    return [sentence for sentence in pool if sentence in sampled]
