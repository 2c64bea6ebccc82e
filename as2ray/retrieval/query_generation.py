"""Generates questions for documents: from headings, leading sentences, words, or with a generator.

A heading names the content below it. A leading sentence introduces its paragraph; as a question it
retrieves another sentence on the same topic, never itself. A question of words is half of a
sentence's words: it retrieves that sentence, and a ranker learns to look for words in a candidate.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Final, Literal

from pydantic import PositiveInt, SkipValidation

from as2ray.errors import ConfigError, validate_arguments
from as2ray.retrieval.pseudo_labels import Query
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.schema import batched

QuerySource = Literal["headings", "leading", "words", "generator"]
"""What questions are generated from."""

QueryGenerator = Callable[[Sequence[str]], Sequence[str]]
"""Returns a question for each sentence, or an empty string."""

MapFunction = Callable[[QueryGenerator, Iterable[list[str]]], Iterator[Sequence[str]]]

MIN_HEADING_WORDS: Final = 2
"""Minimum number of words of a heading that becomes a question."""

GENERATOR_BATCH: Final = 64
"""Number of sentences that a generator gets at a time."""

NUM_EXAMPLES: Final = 3
"""Maximum number of examples of questions."""

MAX_EXAMPLE_WORDS: Final = 8
"""Maximum number of words of a paragraph that is an example for want of headings."""

EXAMPLE_PARAGRAPHS: Final = 500
"""Number of paragraphs from whose headings examples are taken."""

WORD_PATTERN = re.compile(r"[^\W\d]{3,}")
STOP_WORDS = frozenset(
    {"the", "and", "are", "for", "with", "that", "this", "its", "from", "which", "can", "has"}
    | {"have", "was", "will", "may", "when", "then", "than", "such", "any", "into", "but"}
    | {"also", "only", "other", "not"}
)
MIN_QUERY_WORDS, MAX_QUERY_WORDS = 3, 7
"""Bounds of the number of words of a question that is half of a sentence's words."""


@validate_arguments
def generate_queries(
    index: SkipValidation[SentenceIndex],
    query_sources: Sequence[QuerySource] = ("headings", "words"),
    max_questions: PositiveInt | None = None,
    seed: int = 0,
    query_generator: QueryGenerator | None = None,
    map_function: MapFunction = map,
) -> list[Query]:
    """Generates questions for the sentences of documents, in their order, without duplicates.

    Args:
        index: Sentences of the documents.
        query_sources: What questions are generated from.
        max_questions: If there are more questions, so many are sampled. A generator gets sentences
            in random order until it has generated so many.
        seed: Seed of the sampling.
        query_generator: Generates questions for the source `generator`.
        map_function: Calls the generator with each batch of sentences, in order; by default in this
            process.

    Raises:
        ConfigError: The source `generator` has no `query_generator`.
    """
    if "generator" in query_sources and query_generator is None:
        raise ConfigError("the query source 'generator' needs a query_generator")
    random = Random(seed)
    query_of_text: dict[str, Query] = {}
    for source in query_sources:
        if source == "generator" and query_generator is not None:
            generate = partial(map_function, query_generator)
            queries = _generate_with_model(index, generate, max_questions, seed)
        else:
            queries = _generate_from_source(index, source, random)
        for query in queries:
            query_of_text.setdefault(query.text.casefold(), query)
    distinct = list(query_of_text.values())
    if max_questions is not None and max_questions < len(distinct):
        sampled = sorted(random.sample(range(len(distinct)), max_questions))
        distinct = [distinct[i] for i in sampled]
    return distinct


def example_questions(index: SentenceIndex) -> list[str]:
    """Returns up to `NUM_EXAMPLES` headings, spread over the first documents of an index.

    Plain text has none; its short paragraphs of one sentence are taken instead.
    """
    paragraphs = list(islice(index.paragraphs(), EXAMPLE_PARAGRAPHS))
    headings = dict.fromkeys(first.heading or first.title for first, _ in paragraphs)
    texts = [text for text in headings if len(text.split()) >= MIN_HEADING_WORDS]
    if not texts:
        lengths = range(MIN_HEADING_WORDS, MAX_EXAMPLE_WORDS + 1)
        lone = dict.fromkeys(first.text for first, sentences in paragraphs if len(sentences) == 1)
        texts = [text for text in lone if len(text.split()) in lengths]
    return texts[:: max(1, len(texts) // NUM_EXAMPLES)][:NUM_EXAMPLES]


def _generate_from_source(
    index: SentenceIndex, query_source: QuerySource, random: Random
) -> Iterator[Query]:
    if query_source == "headings":
        for first, sentences in index.paragraphs():
            # A heading alone may say little, so it follows the title of its document.
            text = " ".join(dict.fromkeys(part for part in (first.title, first.heading) if part))
            if len(text.split()) >= MIN_HEADING_WORDS:
                yield Query(f"heading-{sentences[0]}", text)
    elif query_source == "leading":
        for first, sentences in index.paragraphs():
            if len(sentences) > 1:
                yield Query(f"leading-{sentences[0]}", first.text, sentences[0])
    elif query_source == "words":
        for sentence in range(len(index)):
            if question := sample_words(index.sentence(sentence).text, random):
                yield Query(f"words-{sentence}", question)


def _generate_with_model(
    index: SentenceIndex,
    generate: Callable[[Iterable[list[str]]], Iterator[Sequence[str]]],
    max_questions: int | None,
    seed: int,
) -> Iterator[Query]:
    """Generates questions until `max_questions` are distinct; yields in the sentences' order."""
    order: Sequence[int] = range(len(index))
    if max_questions is not None:
        order = Random(f"{seed} sentences").sample(order, len(order))
    question_of_sentence, distinct = dict[int, str](), set[str]()
    batches = list(batched(order, GENERATOR_BATCH))
    for batch, texts in zip(batches, generate(map(index.texts, batches))):
        for sentence, text in zip(batch, texts):
            if question := text.strip():
                question_of_sentence[sentence] = question
                distinct.add(question.casefold())
        if max_questions is not None and len(distinct) >= max_questions:
            break
    for sentence, question in sorted(question_of_sentence.items()):
        yield Query(f"generated-{sentence}", question)


def sample_words(sentence: str, random: Random) -> str | None:
    """Samples half of a sentence's words, in order; returns None if it has too few."""
    words = [w.lower() for w in WORD_PATTERN.findall(sentence) if w.lower() not in STOP_WORDS]
    if len(words) <= MIN_QUERY_WORDS:
        return None
    size = max(MIN_QUERY_WORDS, min(MAX_QUERY_WORDS, len(words) // 2))
    return " ".join(words[i] for i in sorted(random.sample(range(len(words)), size)))
