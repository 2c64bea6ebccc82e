"""Questions on the Python language reference, which is part of every CPython.

The text is `pydoc_data.topics` of the running interpreter. The questions were written for this
project. Each names a phrase of its answer, so the labels follow the text of each Python version.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from platform import python_version
from typing import Final, NamedTuple
from zlib import crc32

import pyarrow as pa

from as2ray.corpora.corpus import Corpus, CorpusOptions, Source
from as2ray.corpora.reader_utils import candidate_schema
from as2ray.errors import CorpusError
from as2ray.tables.schema import from_rows
from as2ray.text.sentences import split as split_sentences

logger: Final = logging.getLogger(__name__)

_QUESTION_FILE: Final = files("as2ray.corpora") / "python_reference.json"

Topics = Mapping[str, str]
"""Plain text of each topic by its name, in the format of `pydoc_data.topics`."""

CHAPTERS: Final[dict[str, list[str]]] = {
    chapter: topics.split()
    for chapter, topics in {
        "assignments": "assignment augassign",
        "conditions": "booleans truth in",
        "coroutines": "async await",
        "displays": "lists dict exprlists lambda",
        "emulation": "callable-types context-managers numeric-types",
        "execution": "dynamic-features exceptions",
        "literals": "numbers integers floating imaginary atom-literals",
        "loops": "for while break continue else if",
        "name resolution": "execmodel naming",
        "names": "atom-identifiers id-classes identifiers",
        "operators": "binary unary power shifting bitwise conversions operator-summary",
        "primaries": "attribute-references subscriptions slicings",
        "sequences": "typesseq-mutable typesseq",
        "special objects": "bltin-code-objects bltin-ellipsis-object bltin-null-object "
        "bltin-type-objects specialattrs typesfunctions typesmethods typesmodules",
        "statements": "assert pass del return yield global nonlocal",
    }.items()
}
"""Topics that are merged because they are too short or repeat one another; every other topic is a
chapter of its own."""

REPEATING_CHAPTERS: Final = {"compound": ["match", "compound"], "specialnames": ["specialnames"]}
"""Chapters whose topics repeat many others; only their parts that no other topic has are used.

The `match` statement has a topic of its own since Python 3.14.
"""

SPLITS: Final[dict[str, set[str]]] = {
    "train": set(),
    "dev": {"attribute-access", "names", "operators", "sequences", "special objects"},
    "test": {
        *("assignments", "comparisons", "compound", "coroutines", "customization", "debugger"),
        *("displays", "formatstrings", "import", "name resolution", "raise", "sequence-types"),
        *("specialnames", "string-methods", "try", "types", "typesmapping"),
    },
}
"""Chapters of each split; all others are in `train`. A chapter is never divided, so no sentence,
document or topic is in two splits."""

TARGET_SENTENCES, MAX_SENTENCES, MIN_SENTENCES = 40, 80, 15
"""Number of sentences of a document. Sections are added to a document until it has
`TARGET_SENTENCES`, at most `MAX_SENTENCES`; one with fewer than `MIN_SENTENCES` is merged."""


MAX_TERM_LINES = 4
"""Maximum number of lines of a term, such as the signatures of a function."""


class AnnotatedQuestion(NamedTuple):
    """A question with the topic and the phrases by which its answer is found."""

    id: str
    question: str
    topic: str
    phrases: tuple[str, ...]
    """A sentence that holds one of them answers the question."""


class Document(NamedTuple):
    """Some sections of a chapter; its sentences are the candidates of a question."""

    id: str
    """`<chapter>/<first heading>`, with a number if a section is split into several documents."""
    chapter: str
    sentences: tuple[str, ...]
    headings: tuple[str, ...] = ()
    """Heading above each sentence, and the term that it explains, such as a method."""


class LabeledQuestion(NamedTuple):
    """A question with the document that answers it."""

    question: AnnotatedQuestion
    document: Document
    labels: tuple[int, ...]
    """Label of each sentence of the document: 1 if it answers the question, otherwise 0."""


class QuestionReport(NamedTuple):
    """The questions that a text answers, and those whose phrases it does not contain."""

    labeled: tuple[LabeledQuestion, ...]
    skipped: tuple[AnnotatedQuestion, ...]


def annotated_questions() -> tuple[AnnotatedQuestion, ...]:
    """Reads all questions, in the order of their file."""
    records = json.loads(_QUESTION_FILE.read_bytes())
    return tuple(AnnotatedQuestion(**r | {"phrases": tuple(r["phrases"])}) for r in records)


def load_documents(topics: Topics | None = None) -> tuple[Document, ...]:
    """Returns the reference as documents; no sentence is in two of them.

    Args:
        topics: The text; by default that of the running interpreter.

    Raises:
        CorpusError: The interpreter has no `pydoc_data`.
    """
    return _load_interpreter_documents() if topics is None else tuple(_build_documents(topics))


def label_questions(topics: Topics | None = None) -> QuestionReport:
    """Finds the document and the labels of each question; skipped questions are also logged.

    Args:
        topics: The text; by default that of the running interpreter.
    """
    chapters: dict[str, list[Document]] = defaultdict(list)
    for document in load_documents(topics):
        chapters[document.chapter].append(document)
    questions = annotated_questions()
    results = [_label_question(q, chapters[find_chapter(q.topic)]) for q in questions]
    labeled = tuple(result for result in results if result)
    skipped = tuple(question for question, result in zip(questions, results) if not result)
    if skipped:
        ids = ", ".join(question.id for question in skipped)
        logger.warning(
            "this Python's reference does not answer %d questions: %s", len(skipped), ids
        )
    return QuestionReport(labeled, skipped)


def find_chapter(topic: str) -> str:
    """Returns the chapter of a topic; a topic that is long enough is its own chapter."""
    chapters = CHAPTERS | REPEATING_CHAPTERS
    return next((name for name, topics in chapters.items() if topic in topics), topic)


def assign_split(chapter: str) -> str:
    """Returns the split of a chapter, the same for every Python version."""
    return next((split for split, chapters in SPLITS.items() if chapter in chapters), "train")


def read_tables(split: str, source: Source, options: CorpusOptions) -> Iterator[pa.Table]:
    """Reads the questions of a split on the running interpreter's text; `source` is not used."""
    labeled = label_questions().labeled
    yield build_table(q for q in labeled if assign_split(q.document.chapter) == split)


def build_table(questions: Iterable[LabeledQuestion]) -> pa.Table:
    """Makes one row for each sentence of each question's document."""
    rows = (
        (question.id, question.question, f"{question.id}-{k}", sentence, label, document.id)
        for question, document, labels in questions
        for k, (sentence, label) in enumerate(zip(document.sentences, labels))
    )
    return from_rows(rows, candidate_schema("document_id"))


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
    # Quotation marks and emphasis are typesetting, which changes between versions.
    return " ".join(re.sub("[\"“”‘’'*`]", "", text).lower().split())


@cache
def _load_interpreter_documents() -> tuple[Document, ...]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        fix = "install the whole standard library (on Debian: libpython3-stdlib)"
        raise CorpusError("this Python lacks its language reference, pydoc_data", fix) from error
    return tuple(_build_documents(topics))


def _build_documents(topics: Topics) -> Iterator[Document]:
    merged = {name for names in (CHAPTERS | REPEATING_CHAPTERS).values() for name in names}
    single = {name: [name] for name in sorted({*topics} - merged)}
    # The repeating chapters come last: sentences that others have are not used again.
    seen: set[str] = set()
    for chapter, names in (CHAPTERS | single | REPEATING_CHAPTERS).items():
        texts = (topics[name] for name in names if name in topics)
        sections = [section for text in texts for section in _parse_sections(text, seen)]
        for title, sentences in _pack_sections(sections):
            yield Document(f"{chapter}/{title}", chapter, *zip(*sentences))


Section = tuple[str, list[tuple[str, str]]]
"""A heading, and the sentences below it, each with its heading and the term that it explains."""


def _parse_sections(text: str, seen: set[str]) -> Iterator[Section]:
    heading, term, depth, sentences = "", "", 0, list[tuple[str, str]]()
    for block in _split_blocks(text):
        if isinstance(block, str):
            yield heading, sentences
            heading, term, sentences = block, "", []
        elif not _is_code(block):
            indent = _indent(block[0])
            if indent <= depth:
                term = ""
            in_block = _extract_sentences(_join_lines(block))
            if (starts_with_term := _starts_with_term(block)) or _is_term(block, in_block):
                lines = block[:1] if starts_with_term else block
                term, depth = _strip_markup(" ".join(map(str.strip, lines))), indent
            context = ": ".join(filter(None, (heading, term)))
            for sentence in in_block:
                if (normalized := _normalize_text(sentence)) not in seen:
                    seen.add(normalized)
                    sentences.append((sentence, context))
    yield heading, sentences


def _pack_sections(sections: Iterable[Section]) -> list[Section]:
    """Merges sections to about `TARGET_SENTENCES` sentences, and splits long ones evenly."""
    packed: list[Section] = []
    for title, sentences in (part for section in sections for part in _split_section(*section)):
        size = len(packed[-1][1]) if packed else MAX_SENTENCES
        is_small = min(size, len(sentences)) < MIN_SENTENCES
        if (size < TARGET_SENTENCES or is_small) and size + len(sentences) <= MAX_SENTENCES:
            packed[-1][1].extend(sentences)
        else:
            packed.append((title, sentences))
    return packed


def _split_section(title: str, sentences: list[tuple[str, str]]) -> Iterator[Section]:
    num_parts = -(-len(sentences) // MAX_SENTENCES)
    for k in range(num_parts):
        start, end = k * len(sentences) // num_parts, (k + 1) * len(sentences) // num_parts
        yield title + (f" {k + 1}" if num_parts > 1 else ""), sentences[start:end]


_FOOTNOTES = re.compile(r"^ *-\[ Footnotes \]-$", re.MULTILINE)
_UNDERLINE = re.compile(r"([*=~^-])\1{3,}")
_BULLET = re.compile(r" *([*•]|\d+\.|[a-z]\.|\[\d+\]|\(\d+\)) +(?=\S)")


def _split_blocks(text: str) -> Iterator[list[str] | str]:
    """Yields headings as strings, and paragraphs and list items as lists of lines."""
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
_GRAMMAR_OR_TABLE = re.compile(r"::=|>>>|^\s*(\+[-=]{2}|\|)")


def _is_code(lines: list[str]) -> bool:
    """Returns whether lines are code, a grammar production or a table; code is always indented."""
    if any(_GRAMMAR_OR_TABLE.search(line) for line in lines):
        return True
    has_comment = any(re.search(r"\s#\s", line) for line in lines)
    return lines[0].startswith("  ") and (has_comment or bool(_CODE.fullmatch(lines[0])))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _starts_with_term(lines: list[str]) -> bool:
    """Returns whether lines are a term of a definition list and what it means."""
    is_deeper = len(lines) > 1 and _indent(lines[1]) > _indent(lines[0])
    return is_deeper and not re.search(r"[,;:.]", lines[0])


def _is_term(lines: list[str], sentences: list[str]) -> bool:
    """Returns whether lines name what the deeper ones below explain, such as signatures."""
    return not sentences and not lines[-1].endswith((":", ".")) and len(lines) <= MAX_TERM_LINES


def _join_lines(lines: list[str]) -> str:
    """Joins lines to one text, without the term of a definition list."""
    if _starts_with_term(lines):
        lines = lines[1:]
    text = re.sub(r"(?<=[a-z])-\n\s*(?=[a-z])", "-", "\n".join(lines))
    return _strip_markup(" ".join(text.split()))


_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(?=\w)([^*]*[^\s*])\1(?![\w*])")


def _strip_markup(text: str) -> str:
    """Removes emphasis and footnote marks, except in quotation marks, which contain code."""
    parts = re.split(r'("[^"]*")', text)
    for k in range(0, len(parts), 2):
        parts[k] = re.sub(r"\s*\[\d+\](?=\W|$)", "", _EMPHASIS.sub(r"\2", parts[k]))
    return "".join(parts).strip()


_SENTENCE_START = re.compile(r"[^\w\s]{0,3}\w")
_WORD = re.compile(r"[A-Za-z]{2,}")


def _extract_sentences(text: str) -> list[str]:
    """Returns complete sentences: with a start, at least five words and an end mark."""
    spans: list[tuple[int, int]] = []
    for start, end in split_sentences(text):
        # The splitter splits at the dot of `decimal.Decimal` and before a bracket.
        if spans and (spans[-1][1] == start or not _ends_sentence(text[slice(*spans[-1])])):
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    sentences = [text[start:end] for start, end in spans]
    return [
        sentence
        for sentence in sentences
        if _SENTENCE_START.match(sentence) and _ends_sentence(sentence)
        if len(_WORD.findall(sentence)) >= 5
    ]


def _ends_sentence(text: str) -> bool:
    return text.rstrip("\"'”’) ").endswith((".", "!", "?", ":", ";"))


CORPUS: Final = Corpus(
    name="python_reference",
    description="Questions of programmers; sentences of the running Python's language reference",
    license="text: PSF License Version 2, from the interpreter; questions: Apache-2.0",
    files=dict.fromkeys(SPLITS, ()),
    reader=read_tables,
    version=f"Python {python_version()}, questions {crc32(_QUESTION_FILE.read_bytes()):08x}",
)
