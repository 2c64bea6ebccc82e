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

from as2ray.errors import ConfigError
from as2ray.retrieval.pseudo_labels import Query
from as2ray.retrieval.sentence_index import SentenceIndex

QuerySource = Literal["headings", "leading", "words", "generator"]
"""What questions are made of."""

QueryGenerator = Callable[[Sequence[str]], Sequence[str]]
"""A question for each sentence, or an empty text."""

MIN_HEADING_WORDS: Final = 2
"""Words of a heading that is a question."""

GENERATOR_BATCH: Final = 64
"""Sentences that a generator is given at a time."""

WORD_PATTERN = re.compile(r"[^\W\d]{3,}")
STOP_WORDS = frozenset(
    {"the", "and", "are", "for", "with", "that", "this", "its", "from", "which", "can", "has"}
    | {"have", "was", "will", "may", "when", "then", "than", "such", "any", "into", "but"}
    | {"also", "only", "other", "not"}
)
MIN_QUERY_WORDS, MAX_QUERY_WORDS = 3, 7
"""Words of a made question: half of its sentence's, within these bounds."""


def generate_queries(
    index: SentenceIndex,
    query_sources: Sequence[QuerySource] = ("headings", "words"),
    max_questions: int | None = None,
    seed: int = 0,
    query_generator: QueryGenerator | None = None,
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
    if not set(query_sources) <= set(get_args(QuerySource)) or (
        "generator" in query_sources and query_generator is None
    ):
        raise ConfigError(
            f"questions of the kinds {list(query_sources)}, generator {query_generator}"
            f"; expected some of {get_args(QuerySource)}, the last with a generator",
        )
    if max_questions is not None and max_questions < 1:
        raise ConfigError(
            f"most {max_questions}; expected at least 1 question, or none to take all",
        )
    random = Random(seed)
    found: dict[str, Query] = {}
    for kind in query_sources:
        if kind == "generator" and query_generator is not None:
            some = _generate_with_model(index, query_generator, max_questions, seed)
        else:
            some = _generate_from_source(index, kind, random)
        for query in some:
            found.setdefault(query.text.casefold(), query)
    queries = list(found.values())
    if max_questions is not None and max_questions < len(queries):
        queries = [queries[i] for i in sorted(random.sample(range(len(queries)), max_questions))]
    return queries


def _generate_from_source(
    index: SentenceIndex, query_source: QuerySource, random: Random
) -> Iterator[Query]:
    if query_source == "headings":
        yield from _generate_from_headings(index)
    elif query_source == "leading":
        for first, numbers in index.paragraphs():
            if len(numbers) > 1:
                yield Query(f"leading-{numbers[0]}", first.text, numbers[0])
    elif query_source == "words":
        for number in range(len(index)):
            question = sample_words(index.sentence(number).text, random)
            if question is not None:
                yield Query(f"words-{number}", question)


def _generate_with_model(
    index: SentenceIndex, query_generator: QueryGenerator, max_questions: int | None, seed: int
) -> Iterator[Query]:
    """In the sentences' order; no more sentences are read than `most` distinct questions take."""
    order: Sequence[int] = range(len(index))
    if max_questions is not None:
        order = Random(f"{seed} sentences").sample(order, len(order))
    found, distinct = dict[int, str](), set[str]()
    for start in range(0, len(order), GENERATOR_BATCH):
        some = order[start : start + GENERATOR_BATCH]
        asked = (question.strip() for question in query_generator(index.texts(some)))
        found |= {number: question for number, question in zip(some, asked) if question}
        distinct |= {found[number].casefold() for number in some if number in found}
        if max_questions is not None and len(distinct) >= max_questions:
            break
    for number in sorted(found):
        yield Query(f"generated-{number}", found[number])


def _generate_from_headings(index: SentenceIndex) -> Iterator[Query]:
    """A document's title, and each heading after it: alone it may say little."""
    for first, numbers in index.paragraphs():
        parts = dict.fromkeys(p for p in (first.title, first.heading) if p)
        text = " ".join(parts)
        if len(text.split()) >= MIN_HEADING_WORDS:
            yield Query(f"heading-{numbers[0]}", text)


def sample_words(sentence: str, random: Random) -> str | None:
    """Half of a sentence's words in their order; None where it has too few."""
    words = [w.lower() for w in WORD_PATTERN.findall(sentence) if w.lower() not in STOP_WORDS]
    if len(words) <= MIN_QUERY_WORDS:
        return None
    size = max(MIN_QUERY_WORDS, min(MAX_QUERY_WORDS, len(words) // 2))
    return " ".join(words[i] for i in sorted(random.sample(range(len(words)), size)))
