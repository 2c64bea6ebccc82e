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

from as2ray.errors import CorpusError, RecipeError
from as2ray.records import CANDIDATES
from as2ray.retrieval.bm25 import Hit
from as2ray.retrieval.index import SentenceIndex
from as2ray.text.likeness import likeness, words_of


class Query(NamedTuple):
    """A question to be labelled."""

    id: str
    text: str
    without: int | None = None
    """Number of the sentence that it was made of; that and those of its text are no answers."""


@dataclass(frozen=True)
class PseudoLabels:
    """How labels are made."""

    depth: int = 100
    """Of BM25's list that negatives are drawn from."""
    negatives: int = 5
    """Of each question; the pairwise objective draws one of them an epoch."""
    near_duplicates: float | None = None
    """Leave out negatives whose words are this like the positive's (Jaccard, 0 to 1); by default
    only those whose text is the same."""
    seed: int = 0
    """Of the drawing."""

    def __post_init__(self) -> None:
        like = self.near_duplicates
        if self.depth < 2 or self.negatives < 1 or not (like is None or 0 < like <= 1):
            raise RecipeError(
                f"depth {self.depth}, negatives {self.negatives}, near_duplicates {like}",
                expected="depth >= 2, at least 1 negative, near_duplicates None or above 0 to 1",
                mend="correct the recipe",
            )


@dataclass(frozen=True)
class Labelled:
    """What came of the questions."""

    table: pa.Table
    """Candidates, the positive first in each question, with their documents' ids."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Questions without labels, by reason."""


def pseudo_labels(
    index: SentenceIndex, queries: Iterable[Query], how: PseudoLabels | None = None
) -> Labelled:
    """A candidates table out of questions that have no labels.

    Args:
        index: Of the sentences.
        queries: Questions of a user, or made of the documents.
        how: How labels are made.

    Raises:
        CorpusError: No question finds a positive and a negative.
    """
    told = how or PseudoLabels()
    rows: list[tuple[str, str, str, str, int, str]] = []
    left_out: Counter[str] = Counter()
    for query in queries:
        hits = index.top(query.text, told.depth + 1)
        if query.without is not None:
            (own,) = index.texts([query.without])
            hits = [h for h in hits if index.sentence(h.index).text != own]
        if not hits:
            left_out["finds nothing"] += 1
            continue
        chosen = [hits[0].index, *_negatives(index, hits[: told.depth], told, query.id)]
        if len(chosen) < 2:
            left_out["finds no negative"] += 1
            continue
        rows += _rows(index, query, chosen)
    if not rows:
        raise CorpusError(
            f"no question can be labelled: {dict(left_out)}",
            expected="questions that share words with at least two sentences of the documents",
            mend="give other questions, or more documents",
        )
    schema = CANDIDATES.append(pa.field("document_id", pa.string()))
    columns = zip(zip(*rows), schema)
    return Labelled(pa.table([pa.array(c, f.type) for c, f in columns], schema=schema), left_out)


def _negatives(
    index: SentenceIndex, hits: list[Hit], how: PseudoLabels, question: str
) -> Iterator[int]:
    """Some of the list below its first, in the list's order."""
    first, *texts = index.texts([hit.index for hit in hits])
    words, most = words_of(first), how.near_duplicates
    pool = [
        hit.index
        for hit, text in zip(hits[1:], texts)
        if text != first and (most is None or likeness(words, words_of(text)) < most)
    ]
    # By question, so that leaving one out changes no other's labels.
    drawn = set(Random(f"{how.seed} {question}").sample(pool, min(how.negatives, len(pool))))
    return (number for number in pool if number in drawn)


def _rows(
    index: SentenceIndex, query: Query, chosen: list[int]
) -> list[tuple[str, str, str, str, int, str]]:
    sentences = [index.sentence(number) for number in chosen]
    return [
        (query.id, query.text, f"{query.id}-{number}", s.text, int(place == 0), s.document)
        for place, (number, s) in enumerate(zip(chosen, sentences))
    ]
