"""Natural Questions (Kwiatkowski et al. 2019), converted to sentence candidates as ASNQ was.

Reads both JSON formats of the release: the original one, which lists tokens, and the simplified
one, which joins them by single blanks; and the hub's copy of the original one. The release has 42
GB compressed, so records are read one at a time.

ASNQ's conversion was never published: neither its sentence splitter, nor its selection of
questions, nor its rule for five annotators. Each of these is an option here, and ASNQ's counts
cannot be expected.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import HUB, Corpus, Record, RecordConversion, Source
from as2ray.corpora.page_grades import (
    POSITIVE_GRADE,
    Candidates,
    Page,
    PageOptions,
    build_table,
    grade_sentences,
    overlaps,
    split_page,
)
from as2ray.corpora.record_conversion import convert_strictly
from as2ray.errors import CorpusError
from as2ray.tables import raw_files

FILES: Final = {
    "train": ("v1.0-simplified_simplified-nq-train.jsonl", "simplified-nq-train.jsonl"),
    "dev": ("v1.0-simplified_nq-dev-all.jsonl", "nq-dev-all.jsonl"),
}
"""Files of the simplified format; those of the original one are `nq-<split>-00.jsonl.gz`, ..."""

HUB_DATASET: Final = "google-research-datasets/natural_questions"
HUB_SPLITS: Final = {"train": ("default", "train"), "dev": ("dev", "validation")}
"""Configuration and split of the hub's copy; `dev` downloads no training data."""

ROWS_PER_HUB_TABLE: Final = 64
"""A page has some 10,000 tokens."""

SentenceBoundaries = Literal["blocks", "rows", "none"]
AnnotationRule = Literal["union", "agreed", "first"]

ASNQ_OPTIONS: Final = {
    "sentence_boundaries": "none",
    "sentence_splitter": "simple",
    "answer_rule": "string",
}
"""The options closest to ASNQ's candidates: the page joined into one text, headings included, a
splitter that splits at a full stop before a capital letter, as Punkt does, and answers that a
sentence contains as a string (TANDA, section 4)."""

MIN_AGREEING: Final = 2
"""Number of the five annotators who must have marked a short answer; the threshold of NQ's own
evaluation."""

EDIT_LINK: Final = ["(", "edit", ")"]
"""Tokens of the edit link at the end of a heading."""

_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9]*(_[^<>]*)?>")
_CELL = re.compile(r"</?T[dh]\b|</?T[dh]_", re.IGNORECASE)

TokenSpan = tuple[int, int]
"""Half-open range of a document's tokens."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NaturalQuestionsOptions(PageOptions):
    """Options of Natural Questions."""

    sentence_boundaries: SentenceBoundaries = "blocks"
    """`blocks`: no sentence crosses an HTML tag. `rows`: the cells of a table row stay together.
    `none`: the page is one text, as in ASNQ."""
    annotation_rule: AnnotationRule = "union"
    """Which of several annotators count. `union`: all of them. `agreed`: all of them if two marked
    a short answer, otherwise none. `first`: the first one who marked a short answer."""
    answer_rule: Literal["words", "string"] = "words"
    """What a sentence needs for grades 4 and 2. `words`: a part of a marked short answer, and its
    words in upper or lower case. `string`: the whole marked short answer, and its characters, even
    inside a word."""
    question_scope: Literal["answered", "all"] = "answered"
    """`answered`: questions with a sentence of grade 4. `all`: every question."""


class Annotation(NamedTuple):
    """The answers that one annotator marked."""

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
        """Returns the words of a range of tokens."""
        tokens = zip(self.tokens[slice(*span)], self.is_tag[slice(*span)])
        return " ".join(token for token, is_tag in tokens if token and not is_tag)


def read_tables(split: str, source: Source, options: NaturalQuestionsOptions) -> Iterator[pa.Table]:
    """Reads one table per question; its columns start and end are token ranges of the document.

    Grades follow from token spans: 4 a sentence with a short answer, 3 another sentence of the long
    answer, 2 a sentence outside with the text of a short answer, 1 any other; see `answer_rule`.
    Ids depend only on `sentence_boundaries` and `sentence_splitter`.

    Args:
        split: One of `FILES`.
        source: One file, a folder with the simplified or the original files, or the hub.
        options: Options of the corpus.
    """
    if source != HUB:
        yield from convert_strictly(CONVERSION, split, source, options)
        return
    with raw_files.value_errors(HUB_DATASET):
        for record in _read_hub_records(split, options.hub_revision):
            name = f"{HUB_DATASET}, question {record['example_id']}"
            if (table := convert_record(json.dumps(record), name, options)) is not None:
                yield table


def _read_hub_records(split: str, revision: str | None) -> Iterator[dict[str, Any]]:
    """Reads the hub's copy in the structure of the original format; its HTML is not loaded."""
    config, hub_split = HUB_SPLITS[split]
    tables = raw_files.read_hub(HUB_DATASET, hub_split, config, revision, ROWS_PER_HUB_TABLE)
    for table in tables:
        columns = [
            table["id"],
            pc.struct_field(table["question"], "text"),
            pc.struct_field(table["document"], "url"),
            pc.struct_field(table["document"], "tokens"),
            table["annotations"],
        ]
        for id, question, url, tokens, annotations in zip(*(c.to_pylist() for c in columns)):
            yield {
                "example_id": id,
                "question_text": question,
                "document_url": url,
                "document_tokens": [
                    {"token": token, "html_token": is_html}
                    for token, is_html in zip(tokens["token"], tokens["is_html"])
                ],
                "annotations": [
                    {"long_answer": long, "short_answers": _transpose(short)}
                    for long, short in zip(annotations["long_answer"], annotations["short_answers"])
                ],
            }


def _transpose(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the records of equally long columns."""
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def find_files(split: str, source: Source) -> list[Path]:
    """Returns the files of a split: the simplified one, or all original ones.

    Raises:
        RawFileNotFoundError: There are neither.
    """
    folder = Path(source)
    original = sorted(folder.glob(f"**/nq-{split}-[0-9]*.jsonl*"))
    if original and raw_files.find_file(folder, FILES[split]) is None:
        return original
    return [raw_files.require_file(folder, FILES[split])]


def read_records(path: Path) -> Iterator[Record]:
    """Reads the records of a file: one JSON value per line, or values over several lines."""
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
    """Parses a record of either format.

    Args:
        text: The record.
        source: Its file and line, for error texts.

    Raises:
        CorpusError: A missing key, or answers outside the page.
        ValueError: The text is not JSON.
    """
    record = json.loads(text)
    id, question = raw_files.require_keys(record, ["example_id", "question_text"], source)
    tokens, is_tag = _parse_tokens(record, source)
    annotations = [
        _parse_annotation(annotation, len(tokens), source)
        for annotation in record.get("annotations", [])
    ]
    url = str(record.get("document_url") or id)
    return Document(str(id), str(question).strip(), url, tokens, is_tag, annotations)


def select_answers(
    annotations: Sequence[Annotation], rule: AnnotationRule
) -> tuple[list[TokenSpan], list[TokenSpan]]:
    """Selects the long and the short answers of a question that count.

    Args:
        annotations: All annotations of the question.
        rule: See `NaturalQuestionsOptions.annotation_rule`.
    """
    with_short = [annotation for annotation in annotations if annotation.short_answers]
    if rule == "first":
        annotations = with_short[:1]
    elif rule == "agreed" and len(with_short) < min(MIN_AGREEING, len(annotations)):
        annotations = []
    long = [annotation.long_answer for annotation in annotations if annotation.long_answer]
    return long, [span for annotation in annotations for span in annotation.short_answers]


def convert_record(text: str, source: str, options: NaturalQuestionsOptions) -> pa.Table | None:
    """Returns the candidates of one record, or None if its question is left out."""
    document = parse_document(text, source)
    long, short = select_answers(document.annotations, options.annotation_rule)
    if options.question_scope == "answered" and not short:
        return None  # true of most questions; splitting their pages would take most of the time
    page, token_spans = _split_document(document, options)
    is_string = options.answer_rule == "string"
    is_inside, has_answer = overlaps(token_spans, long), overlaps(token_spans, short, is_string)
    texts = map(document.span_text, short)
    grades = grade_sentences(page, is_inside, has_answer, texts, is_string)
    is_answered = (grades == POSITIVE_GRADE).any()
    sentences = np.flatnonzero(options.is_candidate(grades))
    if not len(sentences) or (options.question_scope == "answered" and not is_answered):
        return None
    candidates = Candidates(document.id, document.question, sentences, grades[sentences])
    table = build_table(page, [candidates])
    starts, ends = token_spans[sentences].astype(np.int32).T
    return table.append_column("start", pa.array(starts)).append_column("end", pa.array(ends))


def _parse_tokens(record: Mapping[str, Any], source: str) -> tuple[list[str], np.ndarray]:
    if "document_tokens" in record:
        keys = ["token", "html_token"]
        pairs = [raw_files.require_keys(t, keys, source) for t in record["document_tokens"]]
        is_tag = np.array([bool(is_tag) for _, is_tag in pairs], bool)
        return [str(token) for token, _ in pairs], is_tag
    (text,) = raw_files.require_keys(record, ["document_text"], source)
    tokens = text.split(" ")  # only at single blanks: token numbers count empty tokens
    return tokens, np.array([_TAG.fullmatch(token) is not None for token in tokens], bool)


def _parse_annotation(record: Any, num_tokens: int, source: str) -> Annotation:
    keys = ["long_answer", "short_answers"]
    long_record, short_records = raw_files.require_keys(record, keys, source)
    (span,) = _parse_spans([long_record], source)
    long = span if span[0] >= 0 else None
    shorts = tuple(_parse_spans(short_records, source))
    start, end = long or (0, 0)
    is_long_valid = long is None or start < end <= num_tokens
    if not is_long_valid or not all(start <= short[0] < short[1] <= end for short in shorts):
        expected = f"inside the {num_tokens:,} tokens and around the short answers {list(shorts)}"
        problem = f"{source}: the long answer {long} must be {expected}"
        raise CorpusError(problem, fix="use the published file")
    return Annotation(long, shorts)


def _parse_spans(records: Sequence[Any], source: str) -> list[TokenSpan]:
    pairs = (raw_files.require_keys(r, ["start_token", "end_token"], source) for r in records)
    return [(int(start), int(end)) for start, end in pairs]


def _split_document(
    document: Document, options: NaturalQuestionsOptions
) -> tuple[Page, np.ndarray]:
    """Returns the sentences and their ranges of the document's tokens, shape [sentences, 2]."""
    blocks = _split_blocks(document, options.sentence_boundaries)
    words = [[document.tokens[i] for i in block] for block in blocks]
    texts = [" ".join(block) for block in words]
    page = split_page(document.url, texts, options.sentence_splitter)
    word_starts = [np.cumsum([0, *(len(word) + 1 for word in block)]) for block in words]
    token_spans = np.zeros((len(page.sentences), 2), np.int64)
    places = zip(page.paragraph_index.tolist(), page.spans.tolist())
    for row, (block, (start, end)) in enumerate(places):
        first, last = np.searchsorted(word_starts[block], [start, end - 1], side="right") - 1
        token_spans[row] = blocks[block][first], blocks[block][last] + 1
    return page, token_spans


def _split_blocks(document: Document, sentence_boundaries: SentenceBoundaries) -> list[list[int]]:
    """Returns the token numbers of the words between two boundaries."""
    has_boundaries, keeps_cells = sentence_boundaries != "none", sentence_boundaries == "rows"
    blocks: list[list[int]] = [[]]
    for number, (token, is_tag) in enumerate(zip(document.tokens, document.is_tag.tolist())):
        if not is_tag and token.strip():
            blocks[-1].append(number)
        elif is_tag and has_boundaries and not (keeps_cells and _CELL.match(token)):
            blocks.append([])
    if has_boundaries:
        blocks = [_remove_edit_link(document, block) for block in blocks]
    return [block for block in blocks if block]


def _remove_edit_link(document: Document, block: list[int]) -> list[int]:
    ends_with_link = [document.tokens[i] for i in block[-3:]] == EDIT_LINK
    return block[:-3] if ends_with_link else block


CONVERSION: Final = RecordConversion(find_files, read_records, convert_record)
"""A record is a question with its page."""

CORPUS: Final = Corpus(
    name="nq",
    description="Questions of Google's log; every sentence of a Wikipedia page, graded as ASNQ",
    license="CC BY-SA 3.0",
    urls=(
        "https://storage.googleapis.com/natural_questions/v1.0-simplified/simplified-nq-train.jsonl.gz",
        "https://storage.googleapis.com/natural_questions/v1.0-simplified/nq-dev-all.jsonl.gz",
    ),
    files=FILES,
    reader=read_tables,
    options_type=NaturalQuestionsOptions,
    conversion=CONVERSION,
    hub=HUB_DATASET,
)
