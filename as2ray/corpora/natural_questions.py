"""Natural Questions (Kwiatkowski et al. 2019) turned into sentence candidates, as ASNQ was.

Knows the release's two JSON formats: the original one, which lists tokens, and the simplified one,
which joins them by single blanks. Must not know any other corpus. 42 GB packed: a record at a time.

ASNQ's own conversion was never published: which sentence splitter, which questions stayed, what was
done with five annotators. So each of these is an option here, and no count can be promised.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from as2ray.corpora import files
from as2ray.corpora.asnq import EVERY, check_negatives
from as2ray.corpora.base import Building, Corpus, Record, Source
from as2ray.corpora.building import strict
from as2ray.corpora.pages import POSITIVE, Page, cut, grades, overlapping
from as2ray.errors import CorpusError
from as2ray.text.sentences import find

FILES: Final = {
    "train": ("v1.0-simplified_simplified-nq-train.jsonl", "simplified-nq-train.jsonl"),
    "dev": ("v1.0-simplified_nq-dev-all.jsonl", "nq-dev-all.jsonl"),
}
"""The simplified files; the original ones are `nq-<split>-00.jsonl.gz` and so on."""

BOUNDARIES: Final = ("blocks", "rows", "none")
ANNOTATIONS: Final = ("union", "agreed", "first")
QUESTIONS: Final = ("answered", "all")

COMPATIBLE: Final[Mapping[str, Any]] = {"boundaries": "none", "splitter": "simple"}
"""Options as near to ASNQ as can be told: the page's text joined flat, headings glued to what
follows, and a splitter that goes by a stop before a capital, as Punkt does."""

AGREED: Final = 2
"""Annotators of five who must have found an answer; the threshold of NQ's own evaluation."""

EDIT: Final = ["(", "edit", ")"]
"""What is left of a link at the end of a heading."""

_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9]*(_[^<>]*)?>")
_CELL = re.compile(r"</?T[dh]\b|</?T[dh]_", re.IGNORECASE)

Span = tuple[int, int]


class Annotation(NamedTuple):
    """What one person marked, as half-open ranges of tokens."""

    long: Span | None
    short: tuple[Span, ...]


class Document(NamedTuple):
    """A question with its page."""

    id: str
    question: str
    url: str
    tokens: list[str]
    tags: np.ndarray
    """Which tokens are HTML tags, shape [tokens], bool."""
    annotations: list[Annotation]

    def text(self, span: Span) -> str:
        """The words of a range of tokens."""
        return " ".join(
            t for t, tag in zip(self.tokens[slice(*span)], self.tags[slice(*span)]) if t and not tag
        )


def reader(
    split: str,
    source: Source,
    *,
    boundaries: str = "blocks",
    annotations: str = "union",
    questions: str = "answered",
    negatives: Sequence[int] = EVERY,
    splitter: str = "syntok",
) -> Iterator[pa.Table]:
    """One table a question, each row with the range of its document's tokens.

    Grades follow from token spans: 4 a sentence that overlaps a short answer, 3 another of the long
    answer, 2 one outside with the words of a short answer, 1 any other. Ids depend on `boundaries`
    and `splitter` alone.

    Args:
        split: One of `FILES`.
        source: One file, or a folder with the simplified or the original files.
        boundaries: No sentence crosses any HTML tag (`blocks`), or any but those of the cells of
            one row (`rows`); or the page is one text (`none`), as in ASNQ.
        annotations: Of several people's: the marks of all (`union`); of all if two of them found a
            short answer, else none (`agreed`); of the first who found one (`first`).
        questions: Those with a sentence of grade 4 (`answered`), or `all`.
        negatives: The grades kept as negatives, as in ASNQ.
        splitter: A name of `as2ray.text.sentences.SPLITTERS`.
    """
    options = {
        "boundaries": boundaries,
        "annotations": annotations,
        "questions": questions,
        "negatives": negatives,
        "splitter": splitter,
    }
    yield from strict(BUILDING, split, source, options)


def paths(split: str, source: Source) -> list[Path]:
    """The files of a split: the simplified one, or all of the original ones.

    Raises:
        SourceMissingError: Neither is there.
    """
    folder = Path(source)
    original = sorted(folder.glob(f"**/nq-{split}-[0-9]*.jsonl*"))
    if original and files.present(folder, FILES[split]) is None:
        return original
    return [files.locate(folder, FILES[split])]


def records(path: Path) -> Iterator[Record]:
    """The records of a file: a JSON value a line, or values laid out over several lines."""
    with files.opened(path) as lines:
        first = next(lines, "")
        if first.strip() not in ("{", "["):
            for number, line in enumerate(chain([first], lines), 1):
                if line.strip():
                    yield Record(f"{path}, line {number:,}", line)
            return
    for number, value in enumerate(files.json_records(path), 1):
        yield Record(f"{path}, record {number:,}", json.dumps(value))


def document(text: str, where: str) -> Document:
    """A record of either format.

    Raises:
        CorpusError: No JSON, a missing key, or marks outside the page.
    """
    try:
        record = json.loads(text)
        id, question = files.need(record, ["example_id", "question_text"], where)
        tokens, tags = _tokens(record, where)
        marked = [_annotation(a, len(tokens), where) for a in record.get("annotations", [])]
        url = str(record.get("document_url") or id)
        return Document(str(id), str(question).strip(), url, tokens, tags, marked)
    except (ValueError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"{where}: {error}"[:300],
            expected="a record of Natural Questions in its original or its simplified format",
            mend="give the publisher's own file",
        ) from error


def marks(annotations: Sequence[Annotation], rule: str) -> tuple[list[Span], list[Span]]:
    """The long and the short answers that count.

    Args:
        annotations: Of one question.
        rule: One of `ANNOTATIONS`.
    """
    found = [a for a in annotations if a.short]
    if rule == "first":
        annotations = found[:1]
    elif rule == "agreed" and len(found) < min(AGREED, len(annotations)):
        annotations = []
    long = [a.long for a in annotations if a.long]
    return long, [span for a in annotations for span in a.short]


def check(
    boundaries: str, annotations: str, questions: str, negatives: Sequence[int], splitter: str
) -> None:
    """Looks at the options before anything is read.

    Raises:
        CorpusError: One is unknown.
    """
    find(splitter)
    check_negatives(negatives)
    for came, known in (
        (boundaries, BOUNDARIES),
        (annotations, ANNOTATIONS),
        (questions, QUESTIONS),
    ):
        if came not in known:
            raise CorpusError(
                f"the option {came!r}", expected=f"one of {list(known)}", mend="correct it"
            )


def make(
    text: str,
    where: str,
    boundaries: str,
    annotations: str,
    questions: str,
    negatives: Sequence[int],
    splitter: str,
) -> pa.Table | None:
    """The candidates of one record; None of one whose question is left out."""
    asked = document(text, where)
    long, short = marks(asked.annotations, annotations)
    if questions == "answered" and not short:
        return None  # most questions; their pages need not be cut
    page, places = _sentences(asked, boundaries, splitter)
    inside, answering = overlapping(places, long), overlapping(places, short)
    grade = grades(page, inside, answering, map(asked.text, short))
    if questions == "answered" and not (grade == POSITIVE).any():
        return None
    kept = np.flatnonzero(np.isin(grade, check_negatives(negatives).to_numpy()))
    return _table(asked, page.sentences, places, grade, kept) if len(kept) else None


def _tokens(record: Mapping[str, Any], where: str) -> tuple[list[str], np.ndarray]:
    if "document_tokens" in record:
        pairs = [files.need(t, ["token", "html_token"], where) for t in record["document_tokens"]]
        tokens = [str(token) for token, _ in pairs]
        return tokens, np.array([bool(tag) for _, tag in pairs], bool)
    (text,) = files.need(record, ["document_text"], where)
    tokens = text.split(" ")  # on single blanks alone: token numbers count empty ones
    return tokens, np.array([_TAG.fullmatch(token) is not None for token in tokens], bool)


def _annotation(record: Any, tokens: int, where: str) -> Annotation:
    long, short = files.need(record, ["long_answer", "short_answers"], where)
    (span,) = _spans([long], where)
    inside = span if span[0] >= 0 else None
    shorts = tuple(_spans(short, where))
    start, end = inside or (0, 0)
    wrong = [s for s in shorts if not start <= s[0] < s[1] <= end]
    if wrong or (inside and not start < end <= tokens):
        raise CorpusError(
            f"{where}: long answer {inside}, short answers {list(shorts)} in {tokens:,} tokens",
            expected="short answers inside the long one, and that inside the page",
            mend="give the publisher's own file",
        )
    return Annotation(inside, shorts)


def _spans(records: Sequence[Any], where: str) -> list[Span]:
    pairs = (files.need(r, ["start_token", "end_token"], where) for r in records)
    return [(int(start), int(end)) for start, end in pairs]


def _sentences(asked: Document, boundaries: str, splitter: str) -> tuple[Page, np.ndarray]:
    """Sentences, and their ranges of the document's tokens, shape [sentences, 2]."""
    blocks = _blocks(asked, boundaries)
    words = [[asked.tokens[i] for i in block] for block in blocks]
    page = cut(asked.url, [" ".join(block) for block in words], splitter)
    starts = [np.cumsum([0, *(len(word) + 1 for word in block)]) for block in words]
    places = np.zeros((len(page.sentences), 2), np.int64)
    for row, (block, (start, end)) in enumerate(zip(page.paragraph.tolist(), page.spans)):
        first, last = np.searchsorted(starts[block], [start, end - 1], side="right") - 1
        places[row] = blocks[block][first], blocks[block][last] + 1
    return page, places


def _blocks(asked: Document, boundaries: str) -> list[list[int]]:
    """Numbers of the words that stand between two boundaries."""
    blocks: list[list[int]] = [[]]
    for number, (token, tag) in enumerate(zip(asked.tokens, asked.tags.tolist())):
        if not tag:
            if token.strip():
                blocks[-1].append(number)
        elif boundaries == "blocks" or (boundaries == "rows" and not _CELL.match(token)):
            blocks.append([])
    if boundaries != "none":
        edits = [[asked.tokens[i] for i in block[-3:]] == EDIT for block in blocks]
        blocks = [block[:-3] if edit else block for block, edit in zip(blocks, edits)]
    return [block for block in blocks if block]


def _table(
    asked: Document, texts: list[str], places: np.ndarray, grade: np.ndarray, kept: np.ndarray
) -> pa.Table:
    rows = len(kept)
    return pa.table(
        {
            "question_id": pa.array([asked.id] * rows),
            "question": pa.array([asked.question] * rows),
            "candidate_id": pa.array([f"{asked.id}-{k}" for k in kept.tolist()]),
            "candidate": pa.array([texts[k] for k in kept.tolist()]),
            "label": pa.array((grade[kept] == POSITIVE).astype(np.int8)),
            "grade": pa.array(grade[kept]),
            "document_id": pa.array([asked.url] * rows),
            "start": pa.array(places[kept, 0].astype(np.int32)),
            "end": pa.array(places[kept, 1].astype(np.int32)),
        }
    )


BUILDING: Final = Building(paths, records, make, check)
"""A question with its page is a record."""

CORPUS: Final = Corpus(
    name="nq",
    about="Questions of Google's log; every sentence of a Wikipedia page, graded as ASNQ",
    licence="CC BY-SA 3.0",
    files=FILES,
    reader=reader,
    building=BUILDING,
)
"""The corpus as the registry holds it."""
