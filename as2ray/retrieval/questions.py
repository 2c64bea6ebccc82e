"""Questions for documents that nobody asked about: headings, leading sentences, words, a generator.

Knows an index. Must not know models: a generator comes as a function.

Headings name what the text below them tells. A leading sentence tells what its paragraph is about;
as a question it finds another sentence on the same matter, never itself. Words are half of a
sentence's own: it is found by them, and a ranker learns to look for words in a candidate.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Final, Literal, get_args

from as2ray.errors import RecipeError
from as2ray.retrieval.index import SentenceIndex
from as2ray.retrieval.pseudo_labels import Query

Kind = Literal["headings", "leading", "words", "generator"]
"""What questions are made of."""

Generator = Callable[[Sequence[str]], Sequence[str]]
"""A question for each sentence, or an empty text."""

LEAST: Final = 2
"""Words of a heading that is a question."""

AT_ONCE: Final = 64
"""Sentences that a generator is given at a time."""

WORD = re.compile(r"[^\W\d]{3,}")
COMMON = frozenset(
    {"the", "and", "are", "for", "with", "that", "this", "its", "from", "which", "can", "has"}
    | {"have", "was", "will", "may", "when", "then", "than", "such", "any", "into", "but"}
    | {"also", "only", "other", "not"}
)
FEWEST, MOST = 3, 7
"""Words of a made question: half of its sentence's, within these bounds."""


def made(
    index: SentenceIndex,
    kinds: Sequence[Kind] = ("headings", "words"),
    most: int | None = None,
    seed: int = 0,
    generator: Generator | None = None,
) -> list[Query]:
    """Questions made of the documents, in their order, without repetitions.

    Args:
        index: Of the documents' sentences.
        kinds: What they are made of.
        most: Draw so many, if there are more; a generator is given sentences, in an order that is
            drawn, until it has asked so many.
        seed: Of the draws.
        generator: Of the kind `generator`.

    Raises:
        RecipeError: An unknown kind, no generator for the kind of that name, or a draw of none.
    """
    if not set(kinds) <= set(get_args(Kind)) or ("generator" in kinds and generator is None):
        raise RecipeError(
            f"questions of the kinds {list(kinds)}, generator {generator}",
            expected=f"some of {get_args(Kind)}, the last with a generator",
            mend="correct the kinds",
        )
    if most is not None and most < 1:
        raise RecipeError(
            f"most {most}", expected="at least 1 question, or none to take all", mend="correct it"
        )
    random = Random(seed)
    found: dict[str, Query] = {}
    for kind in kinds:
        if kind == "generator" and generator is not None:
            some = _generated(index, generator, most, seed)
        else:
            some = _of_kind(index, kind, random)
        for query in some:
            found.setdefault(query.text.casefold(), query)
    queries = list(found.values())
    if most is not None and most < len(queries):
        queries = [queries[i] for i in sorted(random.sample(range(len(queries)), most))]
    return queries


def _of_kind(index: SentenceIndex, kind: Kind, random: Random) -> Iterator[Query]:
    if kind == "headings":
        yield from _headings(index)
    elif kind == "leading":
        for first, numbers in index.paragraphs():
            if len(numbers) > 1:
                yield Query(f"leading-{numbers[0]}", first.text, numbers[0])
    elif kind == "words":
        for number in range(len(index)):
            question = question_of(index.sentence(number).text, random)
            if question is not None:
                yield Query(f"words-{number}", question)


def _generated(
    index: SentenceIndex, generator: Generator, most: int | None, seed: int
) -> Iterator[Query]:
    """In the sentences' order; no more sentences are read than `most` distinct questions take."""
    order: Sequence[int] = range(len(index))
    if most is not None:
        order = Random(f"{seed} sentences").sample(order, len(order))
    found, distinct = dict[int, str](), set[str]()
    for start in range(0, len(order), AT_ONCE):
        some = order[start : start + AT_ONCE]
        asked = (question.strip() for question in generator(index.texts(some)))
        found |= {number: question for number, question in zip(some, asked) if question}
        distinct |= {found[number].casefold() for number in some if number in found}
        if most is not None and len(distinct) >= most:
            break
    for number in sorted(found):
        yield Query(f"generated-{number}", found[number])


def _headings(index: SentenceIndex) -> Iterator[Query]:
    """A document's title, and each heading after it: alone it may say little."""
    for first, numbers in index.paragraphs():
        parts = dict.fromkeys(p for p in (first.title, first.heading) if p)
        text = " ".join(parts)
        if len(text.split()) >= LEAST:
            yield Query(f"heading-{numbers[0]}", text)


def question_of(sentence: str, random: Random) -> str | None:
    """Half of a sentence's words in their order; None where it has too few."""
    words = [w.lower() for w in WORD.findall(sentence) if w.lower() not in COMMON]
    if len(words) <= FEWEST:
        return None
    size = max(FEWEST, min(MOST, len(words) // 2))
    return " ".join(words[i] for i in sorted(random.sample(range(len(words)), size)))
