"""Splits pages into sentences and gives each sentence one of ASNQ's four grades for a question."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import CorpusOptions
from as2ray.corpora.reader_utils import candidate_schema
from as2ray.errors import CorpusError
from as2ray.text.sentences import get_splitter, split

NEGATIVE_GRADES: Final = (1, 2, 3)
"""Grades of sentences that are not an answer; see `grade_sentences`."""

POSITIVE_GRADE: Final = 4
"""Grade of an answer: a sentence of the long answer that contains the short answer."""

NegativeGrades = Annotated[tuple[Annotated[int, Field(ge=1, le=3)], ...], Field(min_length=1)]
"""Grades that are used as negatives: one or more of `NEGATIVE_GRADES`."""


SplitterName = Annotated[str, AfterValidator(lambda name: get_splitter(name).name)]
"""Name of a sentence splitter; see `as2ray.text.sentences`."""

SCHEMA: Final = candidate_schema("grade", "document_id")
"""Columns of graded sentences; the document is the title of the page."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PageOptions(CorpusOptions):
    """Options of every corpus whose pages are split into graded sentences."""

    negative_grades: NegativeGrades = NEGATIVE_GRADES
    """Grades whose sentences are negatives, as in ASNQ; the others are left out."""
    sentence_splitter: SplitterName = "syntok"

    def is_candidate(self, grades: np.ndarray) -> np.ndarray:
        """Returns whether sentences of some grades become candidates, shape [sentences], bool."""
        is_used = np.zeros(POSITIVE_GRADE + 1, bool)
        is_used[[*self.negative_grades, POSITIVE_GRADE]] = True
        return np.take(is_used, grades)


class Page(NamedTuple):
    """A page split into sentences, once for all its questions."""

    title: str
    sentences: list[str]
    paragraph_index: np.ndarray
    """Index of the paragraph of each sentence, ascending, shape [sentences], int64."""
    spans: np.ndarray
    """Range of characters of each sentence in its paragraph, shape [sentences, 2], int64."""
    lowercase_text: str
    """All sentences case-folded, one per line."""
    line_starts: list[int]
    """Position of each sentence in `lowercase_text`."""


def split_page(title: str, paragraphs: Sequence[str], sentence_splitter: str) -> Page:
    """Splits the paragraphs of a page into sentences; no sentence crosses a paragraph."""
    sentences, paragraph_index, spans = [], [], []
    for index, paragraph in enumerate(paragraphs):
        for start, end in split(paragraph, sentence_splitter):
            sentences.append(paragraph[start:end])
            paragraph_index.append(index)
            spans.append((start, end))
    lines = [_fold_case(sentence) for sentence in sentences]
    line_starts = [0, *accumulate(len(line) + 1 for line in lines)][: len(lines)]
    index_array, text = np.array(paragraph_index, np.int64), "\n".join(lines)
    span_array = np.array(spans, np.int64).reshape(-1, 2)
    return Page(title, sentences, index_array, span_array, text, line_starts)


def _fold_case(text: str) -> str:
    return " ".join(text.casefold().split())


def grade_sentences(
    page: Page,
    is_inside: np.ndarray,
    has_answer: np.ndarray,
    answers: Iterable[str],
    is_string: bool = False,
) -> np.ndarray:
    """Returns ASNQ's grade of every sentence of a page (TANDA, Table 1), shape [sentences], int8.

    Args:
        page: The page.
        is_inside: Whether a sentence belongs to a long answer, shape [sentences].
        has_answer: Whether it contains a marked short answer, shape [sentences].
        answers: Texts of the short answers, which other sentences may contain too.
        is_string: Whether any characters count, even inside a word, or whole words in upper or
            lower case.

    Returns:
        4 inside with a short answer, 3 inside without, 2 outside with the text of a short answer,
        1 outside without.
    """
    grades = np.ones(len(page.sentences), np.int8)
    answers = {*answers} - {""}  # a marked answer of tags alone has no text
    if is_string:
        grades[[any(text in sentence for text in answers) for sentence in page.sentences]] = 2
        answers = ()
    for text in {_fold_case(text) for text in answers}:
        grades[_find_sentences(page, text)] = 2
    grades[is_inside] = 3
    grades[is_inside & has_answer] = POSITIVE_GRADE
    return grades


def overlaps(
    ranges: np.ndarray, spans: Iterable[tuple[int, int]], contain: bool = False
) -> np.ndarray:
    """Returns which of `ranges` overlap one of `spans`, shape [ranges], bool.

    Args:
        ranges: Half-open ranges, shape [ranges, 2].
        spans: Half-open ranges on the same axis.
        contain: Whether a range must contain a span as a whole.
    """
    has_overlap = np.zeros(len(ranges), bool)
    for start, end in spans:
        first, last = (end, start) if not contain else (start + 1, end - 1)
        has_overlap |= (ranges[:, 0] < first) & (last < ranges[:, 1])
    return has_overlap


def grade_paragraph_answer(
    page: Page, paragraph_index: int, answers: Sequence[tuple[int, str]], source: str = "a page"
) -> np.ndarray:
    """Returns the grades for a question whose long answer is a paragraph, shape [sentences], int8.

    Args:
        page: The page.
        paragraph_index: Index of the question's paragraph.
        answers: Start in the paragraph and text of each short answer.
        source: What the question was read from, for error texts.

    Raises:
        CorpusError: No sentence of the paragraph contains an answer.
    """
    is_inside = page.paragraph_index == paragraph_index
    has_answer = overlaps(page.spans, [(start, start + len(text)) for start, text in answers])
    grades = grade_sentences(page, is_inside, has_answer, [text for _, text in answers])
    if not (grades == POSITIVE_GRADE).any():
        paragraph = f"{source}: {page.title!r}, paragraph {paragraph_index}"
        problem = f"{paragraph}: no sentence contains one of the answers {answers}"
        raise CorpusError(problem, fix="use the published file")
    return grades


class Candidates(NamedTuple):
    """Sentences of a page that are the candidates of a question."""

    question_id: str
    question: str
    sentence_indices: np.ndarray
    """Indices of the sentences, shape [candidates], int64."""
    grades: np.ndarray
    """Their grades, shape [candidates], int8."""


def build_table(page: Page, candidates: Sequence[Candidates]) -> pa.Table:
    """Returns the candidates of one or more questions on a page, with the columns of `SCHEMA`."""
    question_ids, questions, sentence_indices, grades = zip(*candidates)
    question_index = np.repeat(np.arange(len(candidates)), list(map(len, grades)))
    sentence_index = np.concatenate(sentence_indices)
    grade = np.concatenate(grades)
    question_id = pa.array(question_ids, pa.string()).take(pa.array(question_index))
    index_text = pa.array(sentence_index).cast(pa.string())
    columns = {
        "question_id": question_id,
        "question": pa.array(questions, pa.string()).take(pa.array(question_index)),
        "candidate_id": pc.binary_join_element_wise(question_id, index_text, "-"),
        "candidate": pa.array(page.sentences, pa.string()).take(pa.array(sentence_index)),
        "label": (grade == POSITIVE_GRADE).astype(np.int8),
        "grade": grade,
        "document_id": pa.repeat(pa.scalar(page.title, pa.string()), len(grade)),
    }
    return pa.table(columns, schema=SCHEMA)


def _find_sentences(page: Page, text: str) -> list[int]:
    """Returns the sentences that contain a case-folded text as whole words."""
    sentence_indices, lowercase_text = [], page.lowercase_text
    start = lowercase_text.find(text) if text else -1
    while start >= 0:
        ends = (start, start + len(text))
        if not any(_is_inside_word(lowercase_text, end) for end in ends):
            sentence_indices.append(bisect_right(page.line_starts, start) - 1)
        start = lowercase_text.find(text, start + 1)
    return sentence_indices


def _is_inside_word(text: str, position: int) -> bool:
    return 0 < position < len(text) and text[position - 1].isalnum() and text[position].isalnum()
