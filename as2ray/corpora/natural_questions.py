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

from as2ray.corpora.asnq import NEGATIVE_GRADES, check_negatives
from as2ray.corpora.corpus import Corpus, Record, RecordConversion, Source
from as2ray.corpora.page_grades import POSITIVE_GRADE, Page, grade_sentences, overlaps, split_page
from as2ray.corpora.record_conversion import convert_strictly
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.text.sentences import get_splitter

FILES: Final = {
    "train": ("v1.0-simplified_simplified-nq-train.jsonl", "simplified-nq-train.jsonl"),
    "dev": ("v1.0-simplified_nq-dev-all.jsonl", "nq-dev-all.jsonl"),
}
"""The simplified files; the original ones are `nq-<split>-00.jsonl.gz` and so on."""

SENTENCE_BOUNDARIES: Final = ("blocks", "rows", "none")
ANNOTATION_RULES: Final = ("union", "agreed", "first")
QUESTION_SCOPES: Final = ("answered", "all")

ASNQ_OPTIONS: Final[Mapping[str, Any]] = {"boundaries": "none", "splitter": "simple"}
"""Options as near to ASNQ as can be told: the page's text joined flat, headings glued to what
follows, and a splitter that goes by a stop before a capital, as Punkt does."""

MIN_AGREEING: Final = 2
"""Annotators of five who must have found an answer; the threshold of NQ's own evaluation."""

EDIT_LINK: Final = ["(", "edit", ")"]
"""What is left of a link at the end of a heading."""

_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9]*(_[^<>]*)?>")
_CELL = re.compile(r"</?T[dh]\b|</?T[dh]_", re.IGNORECASE)

TokenSpan = tuple[int, int]


class Annotation(NamedTuple):
    """What one person marked, as half-open ranges of tokens."""

    long_answer: TokenSpan | None
    short_answers: tuple[TokenSpan, ...]


class Document(NamedTuple):
    """A question with its page."""

    id: str
    question: str
    url: str
    tokens: list[str]
    is_tag: np.ndarray
    """Which tokens are HTML tags, shape [tokens], bool."""
    annotations: list[Annotation]

    def span_text(self, span: TokenSpan) -> str:
        """The words of a range of tokens."""
        return " ".join(
            t
            for t, tag in zip(self.tokens[slice(*span)], self.is_tag[slice(*span)])
            if t and not tag
        )


def read_tables(
    split: str,
    source: Source,
    *,
    sentence_boundaries: str = "blocks",
    annotation_rule: str = "union",
    question_scope: str = "answered",
    negatives: Sequence[int] = NEGATIVE_GRADES,
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
        "boundaries": sentence_boundaries,
        "annotations": annotation_rule,
        "questions": question_scope,
        "negatives": negatives,
        "splitter": splitter,
    }
    yield from convert_strictly(CONVERSION, split, source, options)


def find_files(split: str, source: Source) -> list[Path]:
    """The files of a split: the simplified one, or all of the original ones.

    Raises:
        SourceMissingError: Neither is there.
    """
    folder = Path(source)
    original = sorted(folder.glob(f"**/nq-{split}-[0-9]*.jsonl*"))
    if original and raw_files.find_file(folder, FILES[split]) is None:
        return original
    return [raw_files.require_file(folder, FILES[split])]


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file: a JSON value a line, or values laid out over several lines."""
    with raw_files.open_text(path) as lines:
        first = next(lines, "")
        if first.strip() not in ("{", "["):
            for number, line in enumerate(chain([first], lines), 1):
                if line.strip():
                    yield Record(f"{path}, line {number:,}", line)
            return
    for number, value in enumerate(raw_files.read_json_records(path), 1):
        yield Record(f"{path}, record {number:,}", json.dumps(value))


def parse_document(text: str, source: str) -> Document:
    """A record of either format.

    Raises:
        CorpusError: No JSON, a missing key, or marks outside the page.
    """
    try:
        record = json.loads(text)
        id, question = raw_files.require_keys(record, ["example_id", "question_text"], source)
        tokens, tags = _parse_tokens(record, source)
        marked = [_parse_annotation(a, len(tokens), source) for a in record.get("annotations", [])]
        url = str(record.get("document_url") or id)
        return Document(str(id), str(question).strip(), url, tokens, tags, marked)
    except (ValueError, TypeError, AttributeError) as error:
        raise CorpusError(
            (f"{source}: {error}"[:300])
            + "; expected a record of Natural Questions in its original or its simplified format",
            fix="give the publisher's own file",
        ) from error


def select_answers(
    annotations: Sequence[Annotation], rule: str
) -> tuple[list[TokenSpan], list[TokenSpan]]:
    """The long and the short answers that count.

    Args:
        annotations: Of one question.
        rule: One of `ANNOTATIONS`.
    """
    found = [a for a in annotations if a.short_answers]
    if rule == "first":
        annotations = found[:1]
    elif rule == "agreed" and len(found) < min(MIN_AGREEING, len(annotations)):
        annotations = []
    long = [a.long_answer for a in annotations if a.long_answer]
    return long, [span for a in annotations for span in a.short_answers]


def check_options(
    sentence_boundaries: str,
    annotation_rule: str,
    question_scope: str,
    negatives: Sequence[int],
    splitter: str,
) -> None:
    """Looks at the options before anything is read.

    Raises:
        CorpusError: One is unknown.
    """
    get_splitter(splitter)
    check_negatives(negatives)
    for came, known in (
        (sentence_boundaries, SENTENCE_BOUNDARIES),
        (annotation_rule, ANNOTATION_RULES),
        (question_scope, QUESTION_SCOPES),
    ):
        if came not in known:
            raise CorpusError(
                f"the option {came!r}; expected one of {list(known)}",
            )


def convert_record(
    text: str,
    source: str,
    sentence_boundaries: str,
    annotation_rule: str,
    question_scope: str,
    negatives: Sequence[int],
    splitter: str,
) -> pa.Table | None:
    """The candidates of one record; None of one whose question is left out."""
    asked = parse_document(text, source)
    long, short = select_answers(asked.annotations, annotation_rule)
    if question_scope == "answered" and not short:
        return None  # most questions; their pages need not be cut
    page, places = _split_document(asked, sentence_boundaries, splitter)
    inside, answering = overlaps(places, long), overlaps(places, short)
    grade = grade_sentences(page, inside, answering, map(asked.span_text, short))
    if question_scope == "answered" and not (grade == POSITIVE_GRADE).any():
        return None
    kept = np.flatnonzero(np.isin(grade, check_negatives(negatives).to_numpy()))
    return _build_table(asked, page.sentences, places, grade, kept) if len(kept) else None


def _parse_tokens(record: Mapping[str, Any], source: str) -> tuple[list[str], np.ndarray]:
    if "document_tokens" in record:
        pairs = [
            raw_files.require_keys(t, ["token", "html_token"], source)
            for t in record["document_tokens"]
        ]
        tokens = [str(token) for token, _ in pairs]
        return tokens, np.array([bool(tag) for _, tag in pairs], bool)
    (text,) = raw_files.require_keys(record, ["document_text"], source)
    tokens = text.split(" ")  # on single blanks alone: token numbers count empty ones
    return tokens, np.array([_TAG.fullmatch(token) is not None for token in tokens], bool)


def _parse_annotation(record: Any, num_tokens: int, source: str) -> Annotation:
    long, short = raw_files.require_keys(record, ["long_answer", "short_answers"], source)
    (span,) = _parse_spans([long], source)
    inside = span if span[0] >= 0 else None
    shorts = tuple(_parse_spans(short, source))
    start, end = inside or (0, 0)
    wrong = [s for s in shorts if not start <= s[0] < s[1] <= end]
    if wrong or (inside and not start < end <= num_tokens):
        raise CorpusError(
            f"{source}: long answer {inside}, short answers {list(shorts)} in {num_tokens:,} tokens"
            "; expected short answers inside the long one, and that inside the page",
            fix="give the publisher's own file",
        )
    return Annotation(inside, shorts)


def _parse_spans(records: Sequence[Any], source: str) -> list[TokenSpan]:
    pairs = (raw_files.require_keys(r, ["start_token", "end_token"], source) for r in records)
    return [(int(start), int(end)) for start, end in pairs]


def _split_document(
    document: Document, sentence_boundaries: str, splitter: str
) -> tuple[Page, np.ndarray]:
    """Sentences, and their ranges of the document's tokens, shape [sentences, 2]."""
    blocks = _split_blocks(document, sentence_boundaries)
    words = [[document.tokens[i] for i in block] for block in blocks]
    page = split_page(document.url, [" ".join(block) for block in words], splitter)
    starts = [np.cumsum([0, *(len(word) + 1 for word in block)]) for block in words]
    places = np.zeros((len(page.sentences), 2), np.int64)
    for row, (block, (start, end)) in enumerate(zip(page.paragraph_index.tolist(), page.spans)):
        first, last = np.searchsorted(starts[block], [start, end - 1], side="right") - 1
        places[row] = blocks[block][first], blocks[block][last] + 1
    return page, places


def _split_blocks(document: Document, sentence_boundaries: str) -> list[list[int]]:
    """Numbers of the words that stand between two boundaries."""
    blocks: list[list[int]] = [[]]
    for number, (token, tag) in enumerate(zip(document.tokens, document.is_tag.tolist())):
        if not tag:
            if token.strip():
                blocks[-1].append(number)
        elif sentence_boundaries == "blocks" or (
            sentence_boundaries == "rows" and not _CELL.match(token)
        ):
            blocks.append([])
    if sentence_boundaries != "none":
        edits = [[document.tokens[i] for i in block[-3:]] == EDIT_LINK for block in blocks]
        blocks = [block[:-3] if edit else block for block, edit in zip(blocks, edits)]
    return [block for block in blocks if block]


def _build_table(
    document: Document,
    texts: list[str],
    token_spans: np.ndarray,
    grade: np.ndarray,
    kept_rows: np.ndarray,
) -> pa.Table:
    rows = len(kept_rows)
    return pa.table(
        {
            "question_id": pa.array([document.id] * rows),
            "question": pa.array([document.question] * rows),
            "candidate_id": pa.array([f"{document.id}-{k}" for k in kept_rows.tolist()]),
            "candidate": pa.array([texts[k] for k in kept_rows.tolist()]),
            "label": pa.array((grade[kept_rows] == POSITIVE_GRADE).astype(np.int8)),
            "grade": pa.array(grade[kept_rows]),
            "document_id": pa.array([document.url] * rows),
            "start": pa.array(token_spans[kept_rows, 0].astype(np.int32)),
            "end": pa.array(token_spans[kept_rows, 1].astype(np.int32)),
        }
    )


CONVERSION: Final = RecordConversion(find_files, read_records, convert_record, check_options)
"""A question with its page is a record."""

CORPUS: Final = Corpus(
    name="nq",
    description="Questions of Google's log; every sentence of a Wikipedia page, graded as ASNQ",
    license="CC BY-SA 3.0",
    files=FILES,
    reader=read_tables,
    conversion=CONVERSION,
)
"""The corpus as the registry holds it."""
