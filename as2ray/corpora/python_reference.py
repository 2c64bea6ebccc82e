"""The Python language reference that every CPython carries: questions over its own manual.

The text is `pydoc_data.topics` of the running interpreter; the questions were written for this
project and point at their answers by a phrase, so the labels follow the text of each version.
Knows that text. Must not know any other corpus, nor how a user's question finds its candidates.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final, NamedTuple

import pyarrow as pa

from as2ray.corpora.corpus import Corpus, Source
from as2ray.corpora.reader_utils import assign_candidate_ids
from as2ray.errors import CorpusError
from as2ray.tables.schema import CANDIDATE_SCHEMA, OPTIONAL_COLUMNS
from as2ray.text.sentences import split as split_sentences

logger: Final = logging.getLogger(__name__)

Topics = Mapping[str, str]
"""Plain text in the layout of `pydoc_data.topics` by the name of its topic."""

CHAPTERS: Final[dict[str, tuple[str, ...]]] = {
    "assignments": ("assignment", "augassign"),
    "conditions": ("booleans", "truth", "in"),
    "coroutines": ("async", "await"),
    "displays": ("lists", "dict", "exprlists", "lambda"),
    "emulation": ("callable-types", "context-managers", "numeric-types"),
    "execution": ("dynamic-features", "exceptions", "execmodel", "naming"),
    "literals": ("numbers", "integers", "floating", "imaginary", "atom-literals"),
    "loops": ("for", "while", "break", "continue", "else", "if"),
    "names": ("atom-identifiers", "id-classes", "identifiers"),
    "operators": (
        *("binary", "unary", "power", "shifting", "bitwise"),
        *("conversions", "operator-summary"),
    ),
    "primaries": ("attribute-references", "subscriptions", "slicings"),
    "sequences": ("typesseq-mutable", "typesseq"),
    "special objects": (
        *("bltin-code-objects", "bltin-ellipsis-object", "bltin-null-object"),
        *("bltin-type-objects", "specialattrs", "typesfunctions", "typesmethods", "typesmodules"),
    ),
    "statements": ("assert", "pass", "del", "return", "yield", "global", "nonlocal"),
}
"""Topics that are too short alone, or repeat one another; every other topic is a chapter."""

UNDIVIDED_TOPICS: Final = ("compound", "specialnames")
"""Topics that repeat many others; what is left of them are the parts without a topic."""

SPLITS: Final = {"train": 0.60, "dev": 0.75, "test": 1.0}
"""The upper end of each split's share of the chapters' hashes."""

TARGET_SENTENCES, MAX_SENTENCES, MIN_SENTENCES = 40, 80, 15
"""A document is closed at `FULL` sentences; it takes at most `MOST` and joins one of `FEWEST`."""


class AnnotatedQuestion(NamedTuple):
    """A question as it was written: where its answer is, and by which words it is known."""

    id: str
    question: str
    topic: str
    phrases: tuple[str, ...]
    """A sentence that holds one of them answers the question."""


class Document(NamedTuple):
    """Some sections of a chapter: the sentences that are ranked against each other."""

    id: str
    """`<chapter>/<first heading>`, with a number where a section is cut into several."""
    chapter: str
    sentences: tuple[str, ...]


class LabeledQuestion(NamedTuple):
    """A question together with the document that answers it."""

    question: AnnotatedQuestion
    document: Document
    labels: tuple[int, ...]
    """1 for each sentence of the document that answers, 0 for the others."""


class QuestionReport(NamedTuple):
    """The questions that a text answers, and those whose phrases it does not have."""

    labeled: tuple[LabeledQuestion, ...]
    skipped: tuple[AnnotatedQuestion, ...]


def annotated_questions() -> tuple[AnnotatedQuestion, ...]:
    """All questions of the corpus in the order of its file."""
    text = (files("as2ray.corpora") / "python_reference.json").read_text(encoding="utf-8")
    return tuple(
        AnnotatedQuestion(**{**q, "phrases": tuple(q["phrases"])}) for q in json.loads(text)
    )


def load_documents(topics: Topics | None = None) -> tuple[Document, ...]:
    """The reference as documents; no sentence stands in two of them.

    Args:
        topics: The text; without it the running interpreter's.

    Raises:
        CorpusError: The interpreter was installed without `pydoc_data`.
    """
    return _load_interpreter_documents() if topics is None else tuple(_build_documents(topics))


def label_questions(topics: Topics | None = None) -> QuestionReport:
    """The questions with their documents and labels; what had to be skipped is also logged."""
    chapters: dict[str, list[Document]] = {}
    for document in load_documents(topics):
        chapters.setdefault(document.chapter, []).append(document)
    asked: list[LabeledQuestion] = []
    skipped: list[AnnotatedQuestion] = []
    for question in annotated_questions():
        found = _label_question(question, chapters.get(find_chapter(question.topic), []))
        asked.append(found) if found else skipped.append(question)
    if skipped:
        names = ", ".join(q.id for q in skipped)
        logger.warning(
            "this Python's reference does not answer %d questions: %s", len(skipped), names
        )
    return QuestionReport(tuple(asked), tuple(skipped))


def find_chapter(topic: str) -> str:
    """The chapter that a topic belongs to; its own name where it is long enough."""
    return next((name for name, topics in CHAPTERS.items() if topic in topics), topic)


def assign_split(chapter: str) -> str:
    """The split of a chapter, by a hash of its name: the same under every Python.

    Chapters are not divided, so no sentence, document or topic is in two splits.
    """
    named = f"python reference/{chapter}"
    place = int.from_bytes(sha256(named.encode()).digest()[:4]) / 2**32
    return next(split for split, end in SPLITS.items() if place < end)


def read_tables(split: str, source: Source) -> Iterator[pa.Table]:
    """The questions of a split; the text is the running interpreter's, the source is unused."""
    asked = [a for a in label_questions().labeled if assign_split(a.document.chapter) == split]
    yield assign_candidate_ids(build_table(asked))


def build_table(questions: Iterable[LabeledQuestion]) -> pa.Table:
    """One row for each sentence of each question's document, without candidate ids."""
    names = ["question_id", "question", "candidate", "label", "document_id"]
    fields = {f.name: f for f in [*CANDIDATE_SCHEMA, *OPTIONAL_COLUMNS]}
    rows = [
        (a.question.id, a.question.question, sentence, label, a.document.id)
        for a in questions
        for sentence, label in zip(a.document.sentences, a.labels)
    ]
    columns = list(zip(*rows)) or [()] * len(names)
    return pa.table(list(map(list, columns)), schema=pa.schema([fields[n] for n in names]))


def _label_question(
    question: AnnotatedQuestion, documents: Iterable[Document]
) -> LabeledQuestion | None:
    phrases = [_normalize_text(phrase) for phrase in question.phrases]
    for document in documents:
        texts = map(_normalize_text, document.sentences)
        labels = tuple(int(any(phrase in text for phrase in phrases)) for text in texts)
        if any(labels):
            return LabeledQuestion(question, document, labels)
    return None


def _normalize_text(text: str) -> str:
    # Quotation marks and emphasis are the manual's typesetting and change between versions.
    return " ".join(re.sub("[\"“”‘’'*`]", "", text).lower().split())


@cache
def _load_interpreter_documents() -> tuple[Document, ...]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CorpusError(
            "this Python has no pydoc_data"
            "; expected the language reference that CPython's standard library carries",
            fix="install the whole standard library (on Debian: libpython3-stdlib)",
        ) from error
    return tuple(_build_documents(topics))


def _build_documents(topics: Topics) -> Iterator[Document]:
    loose = sorted({*topics} - {t for ts in CHAPTERS.values() for t in ts} - {*UNDIVIDED_TOPICS})
    seen: set[str] = set()
    for chapter, names in (CHAPTERS | {t: (t,) for t in [*loose, *UNDIVIDED_TOPICS]}).items():
        texts = (topics[name] for name in names if name in topics)
        sections = [section for text in texts for section in _parse_sections(text, seen)]
        for title, members in _pack_sections(sections):
            yield Document(f"{chapter}/{title}", chapter, tuple(members))


Section = tuple[str, list[str]]
"""A heading and the sentences below it."""


def _parse_sections(text: str, seen: set[str]) -> Iterator[Section]:
    heading, held = "", list[str]()
    for block in _split_blocks(text):
        if isinstance(block, str):
            yield heading, held
            heading, held = block, []
        elif not _is_code(block):
            new = [
                s for s in _extract_sentences(_join_lines(block)) if _normalize_text(s) not in seen
            ]
            seen.update(map(_normalize_text, new))
            held += new
    yield heading, held


def _pack_sections(sections: Iterable[Section]) -> list[Section]:
    """Sections gathered to documents of about `FULL` sentences, and long ones cut evenly."""
    packed: list[Section] = []
    for title, members in (piece for section in sections for piece in _split_section(*section)):
        size = len(packed[-1][1]) if packed else MAX_SENTENCES
        small = min(size, len(members)) < MIN_SENTENCES
        if (size < TARGET_SENTENCES or small) and size + len(members) <= MAX_SENTENCES:
            packed[-1][1].extend(members)
        else:
            packed.append((title, members))
    return packed


def _split_section(title: str, members: list[str]) -> Iterator[Section]:
    pieces = -(-len(members) // MAX_SENTENCES)
    for k in range(pieces):
        first, last = k * len(members) // pieces, (k + 1) * len(members) // pieces
        yield title + (f" {k + 1}" if pieces > 1 else ""), members[first:last]


_FOOTNOTES = re.compile(r"^ *-\[ Footnotes \]-$", re.MULTILINE)
_UNDERLINE = re.compile(r"([*=~^-])\1{3,}")
_BULLET = re.compile(r" *([*•]|\d+\.|[a-z]\.|\[\d+\]|\(\d+\)) +(?=\S)")


def _split_blocks(text: str) -> Iterator[list[str] | str]:
    """Headings as strings, everything else as the lines between blanks or from a bullet on."""
    lines: list[str] = []
    for line in [*_FOOTNOTES.split(text)[0].splitlines(), ""]:
        bullet = _BULLET.match(line)
        if _UNDERLINE.fullmatch(line.strip()) and len(lines) == 1:
            yield _strip_markup(lines.pop().strip()).replace('"', "")
        elif bullet or not line.strip():
            if lines:
                yield lines
            lines = [" " * bullet.end() + line[bullet.end() :]] if bullet else []
        else:
            lines.append(line.rstrip())


_KEYWORDS = (
    "assert|async|await|break|case|class|continue|def|del|elif|else|except|finally|for|from|"
    "if|import|lambda|match|pass|raise|return|try|type|while|with|yield"
)
_CODE = re.compile(
    rf"""\s*(
      (>>>|\.\.\.|\$|\(Pdb\)|>|->|\||\+|=|~|@|\#).*   # prompts, output, decorators, tables
    | [a-z_]+\s*:(\s.*)?                              # a production, as Python 3.14 writes it
    | ({_KEYWORDS})\b[^.]*[\w:)\]]?                   # a statement
    | [^"]*\s[-+*/@&|^%]?=\s.*                        # an assignment
    | \w+(\.\w+)*\(.*                                 # a call
    | (Traceback|File|[A-Z]\w+Error:)(\s.*)?
    )""",
    re.VERBOSE,
)
_TABLE = re.compile(r"\s*(\+[-=]{2}|\|)")


def _is_code(lines: list[str]) -> bool:
    """Whether lines are code, a production or a table; code is always indented."""
    everywhere = any(mark in line for line in lines for mark in ("::=", ">>>"))
    table = any(_TABLE.match(line) for line in lines)
    indented = lines[0].startswith("  ")
    comment = any(re.search(r"\s#\s", line) for line in lines)
    return everywhere or table or (indented and (comment or _CODE.fullmatch(lines[0]) is not None))


def _join_lines(lines: list[str]) -> str:
    """One line of text, without the term that a definition stands under."""
    depths = [len(line) - len(line.lstrip()) for line in lines]
    if len(lines) > 1 and depths[1] > depths[0] and not re.search(r"[,;:.]", lines[0]):
        lines = lines[1:]
    text = re.sub(r"(?<=[a-z])-\n\s*(?=[a-z])", "-", "\n".join(lines))
    return _strip_markup(" ".join(text.split()))


_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(?=\w)([^*]*[^\s*])\1(?![\w*])")


def _strip_markup(text: str) -> str:
    """Text without emphasis and footnote marks; what stands in quotation marks is code."""
    parts = re.split(r'("[^"]*")', text)
    for k in range(0, len(parts), 2):
        parts[k] = re.sub(r"\s*\[\d+\](?=\W|$)", "", _EMPHASIS.sub(r"\2", parts[k]))
    return "".join(parts).strip()


_BEGINNING = re.compile(r"[^\w\s]{0,3}\w")
_WORD = re.compile(r"[A-Za-z]{2,}")


def _extract_sentences(text: str) -> list[str]:
    """The sentences that could answer something: a beginning, five words or more, and a stop."""
    spans: list[tuple[int, int]] = []
    for start, end in split_sentences(text):
        # Splitters take the stop of `decimal.Decimal` for an end, and break before a bracket.
        if spans and (spans[-1][1] == start or not _ends_sentence(text[slice(*spans[-1])])):
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    found = (text[start:end] for start, end in spans)
    return [
        s for s in found if _BEGINNING.match(s) and _ends_sentence(s) and len(_WORD.findall(s)) >= 5
    ]


def _ends_sentence(text: str) -> bool:
    return text.rstrip("\"'”’) ").endswith((".", "!", "?", ":", ";"))


CORPUS: Final = Corpus(
    name="python_reference",
    description="Questions of programmers; the sentences of the running Python's language reference",
    license="text: PSF License Version 2, from the interpreter; questions: Apache-2.0",
    files=dict.fromkeys(SPLITS, ()),
    reader=read_tables,
)
"""The corpus as the registry holds it."""
