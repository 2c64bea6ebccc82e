"""Pages cut into sentences, and ASNQ's four grades for any question with a place on its page.

Knows paragraphs, answers, places and sentence splitters. Must not know any corpus or file.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from as2ray.errors import CorpusError
from as2ray.text.sentences import split

POSITIVE_GRADE: Final = 4
"""The grade of an answer: inside the long answer, and with the short one."""


class Page(NamedTuple):
    """A page cut into sentences once, for all its questions."""

    title: str
    sentences: list[str]
    paragraph_index: np.ndarray
    """Index of the paragraph of each sentence, ascending, int64."""
    spans: list[tuple[int, int]]
    """Place of each sentence in its paragraph."""
    lowercase_text: str
    """All sentences in folded case, one a line."""
    line_starts: list[int]
    """Where each sentence starts in `folded`."""


def split_page(title: str, paragraphs: Sequence[str], splitter: str) -> Page:
    """The page in sentences; none crosses a paragraph."""
    texts, paragraph, spans = [], [], []
    for p, text in enumerate(paragraphs):
        for start, end in split(text, splitter):
            texts.append(text[start:end])
            paragraph.append(p)
            spans.append((start, end))
    folded = [" ".join(text.casefold().split()) for text in texts]
    lines = [0, *accumulate(len(f) + 1 for f in folded)][: len(folded)]
    return Page(title, texts, np.array(paragraph, np.int64), spans, "\n".join(folded), lines)


def grade_sentences(
    page: Page, is_inside: np.ndarray, has_answer: np.ndarray, answers: Iterable[str]
) -> np.ndarray:
    """ASNQ's grade of every sentence of a page (TANDA, Table 1), shape [sentences], int8.

    Args:
        page: The page.
        inside: Whether a sentence stands in a long answer, shape [sentences].
        answering: Whether it holds a short answer in its marked place, shape [sentences].
        answers: The short answers' texts, which a sentence outside may have too.

    Returns:
        4 inside with a short answer, 3 inside without, 2 outside with the words of a short answer
        (whatever their case), 1 outside without.
    """
    grade = np.ones(len(page.sentences), np.int8)
    for text in {" ".join(text.casefold().split()) for text in answers}:
        grade[_find_sentences(page, text)] = 2
    grade[is_inside] = 3
    grade[is_inside & has_answer] = POSITIVE_GRADE
    return grade


def overlaps(ranges: np.ndarray, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Which of some ranges share a place with one of `spans`, shape [ranges], bool.

    Args:
        places: Half-open ranges, shape [ranges, 2].
        spans: Half-open ranges on the same axis.
    """
    found = np.zeros(len(ranges), bool)
    for start, end in spans:
        found |= (ranges[:, 0] < end) & (start < ranges[:, 1])
    return found


def grade_paragraph_answer(
    page: Page, paragraph_index: int, answers: Sequence[tuple[int, str]], source: str = "a page"
) -> np.ndarray:
    """The grades for a question whose long answer is a paragraph, shape [sentences], int8.

    Args:
        page: The page.
        paragraph: Index of the question's paragraph.
        answers: Start in the paragraph and text of each answer.
        source: What the question was read from, for the error.
    """
    inside = page.paragraph_index == paragraph_index
    places = np.array(page.spans, np.int64).reshape(-1, 2)
    answering = overlaps(places, [(start, start + len(text)) for start, text in answers])
    grade = grade_sentences(page, inside, answering, [text for _, text in answers])
    if not (grade == POSITIVE_GRADE).any():
        raise CorpusError(
            f"{source}: {page.title!r}, paragraph {paragraph_index}: no sentence has {answers}"
            "; expected at least one answer inside the paragraph",
            fix="give the publisher's own file",
        )
    return grade


def _find_sentences(page: Page, text: str) -> list[int]:
    found, at = [], page.lowercase_text.find(text) if text else -1
    while at >= 0:
        after = at + len(text)
        sentence = bisect_right(page.line_starts, at) - 1
        if not (
            _is_inside_word(page.lowercase_text, at) or _is_inside_word(page.lowercase_text, after)
        ):
            found.append(sentence)
        at = page.lowercase_text.find(text, at + 1)
    return found


def _is_inside_word(text: str, position: int) -> bool:
    return 0 < position < len(text) and text[position - 1].isalnum() and text[position].isalnum()
