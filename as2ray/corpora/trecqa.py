"""TREC-QA (Wang, Smith and Mitamura 2007): factoid questions, newswire sentences.

Reads its JSON lines, its pseudo-XML and the variants that papers used. In every file the positives
of a question come first: a ranker that keeps the order of the file would look perfect.
"""

from collections.abc import Iterator
from itertools import starmap
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import Corpus, CorpusOptions, PublishedCounts, ReleaseCount, Source
from as2ray.corpora.detokenize import detokenize
from as2ray.corpora.trecqa_xml import parse_blocks
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import CANDIDATE_SCHEMA, TableCounts, from_rows

MAX_DEV_TOKENS: Final = 40
"""Maximum number of whitespace tokens of a dev candidate of the variant `tanda`."""

FILES: Final = {
    "train": ("train.jsonl", "TRAIN.xml", "train-less-than-40.manual-edit.xml"),
    "train-all": ("train-all.jsonl", "TRAIN-ALL.xml", "train2393.cleanup.xml"),
    "dev": ("dev.jsonl", "DEV.xml", "dev-less-than-40.manual-edit.xml"),
    "test": ("test.jsonl", "TEST.xml", "test-less-than-40.manual-edit.xml"),
}

QUESTION_COUNTS: Final = {"train": 94, "train-all": 1229, "dev": 82, "test": 100}
"""Questions in each file; 1 of train, 1 of dev and 5 of test have no candidates."""

PUBLISHED_COUNTS: Final = tuple(
    PublishedCounts(split, filter, TableCounts(*numbers), {"variant": variant})
    for variant, split, filter, *numbers in [
        ("digits", "train-all", "raw", 1229, 53417, 6410),
        ("digits", "train-all", "clean", 1161, 53310, 6303),
        ("digits", "train", "raw", 93, 4718, 348),
        ("digits", "dev", "raw", 81, 1148, 222),
        ("digits", "dev", "clean", 65, 1117, 205),
        ("digits", "test", "raw", 95, 1517, 284),
        ("digits", "test", "clean", 68, 1442, 248),
        ("tanda", "train-all", "raw", 1229, 53417, 6410),
        ("tanda", "dev", "clean", 65, 1117, 205),
        ("tanda", "test", "clean", 68, 1442, 248),
        ("lexdecomp", "dev", "raw", 82, 1364, 264),
        ("lexdecomp", "dev", "clean", 69, 1343, 243),
        ("lexdecomp", "test", "clean", 68, 1442, 248),
    ]
)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TRECQAOptions(CorpusOptions):
    """Options of TREC-QA."""

    variant: Literal["digits", "tanda", "lexdecomp"] = "digits"
    """`digits`: real digits. `tanda`: `<num>` for digits, no dev candidate over 40 tokens (TANDA).
    `lexdecomp`: the files of `tanda` with all candidates."""
    detokenize: bool = True
    """Whether Penn Treebank tokens become plain text."""


class RawQuestion(NamedTuple):
    """A question of a file."""

    id: str
    text: str
    candidates: list[tuple[str, int]]
    """Sentence and label of each candidate."""


def read_tables(split: str, source: Source, options: TRECQAOptions) -> Iterator[pa.Table]:
    """Reads a split as one table; questions without candidates are left out.

    Args:
        split: One of `FILES`.
        source: The folder (its `tanda/` holds the variants with `<num>`) or one file.
        options: Options of the corpus.
    """
    source = Path(source)
    variant_folder = source / ("" if options.variant == "digits" else "tanda")
    # The source may be the folder of the variant itself.
    folder_or_file = variant_folder if variant_folder.is_dir() else source
    path = raw_files.require_file(folder_or_file, FILES[split])
    is_limited = options.variant == "tanda" and split == "dev"
    to_text = detokenize if options.detokenize else str
    rows = (
        (question.id, to_text(question.text), f"{question.id}-{k}", to_text(sentence), label)
        for question in _read_questions(path)
        for k, (sentence, label) in enumerate(question.candidates)
        if not is_limited or len(sentence.split()) <= MAX_DEV_TOKENS
    )
    yield from_rows(rows, CANDIDATE_SCHEMA)


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Counts the questions in each file, including those without candidates."""
    for split, published in QUESTION_COUNTS.items():
        for folder in ("", "tanda"):
            if path := raw_files.find_file(source / folder, FILES[split]):
                name = "listed questions" + (f" in {folder}" if folder else "")
                yield ReleaseCount(split, name, published, sum(1 for _ in _read_questions(path)))


def _read_questions(path: Path) -> Iterator[RawQuestion]:
    if path.name.removesuffix(".gz").endswith(".xml"):
        with raw_files.open_text(path) as lines:
            yield from starmap(RawQuestion, parse_blocks(lines, str(path)))
        return
    for line, record in raw_files.read_json_lines(path):
        source = f"{path}, line {line:,}"
        with raw_files.value_errors(source):
            question = _parse_question(record, line, source)
        yield question


def _parse_question(record: Any, line_number: int, source: str) -> RawQuestion:
    text, records = raw_files.require_keys(record, ("question", "candidates"), source)
    candidates = [raw_files.require_keys(r, ("sentence", "label"), source) for r in records]
    for value in (text, *(sentence for sentence, _ in candidates)):
        if not isinstance(value, str):
            raise CorpusError(f"{source}: {value!r} is not text")
    for _, label in candidates:
        if isinstance(label, bool) or label not in (0, 1):  # true is equal to 1
            raise CorpusError(f"{source}: label {label!r}; expected 0 or 1")
    # The files with <num> have no ids; the position in the file is the same in every copy.
    return RawQuestion(str(record.get("id", f"q{line_number - 1:06d}")), text, candidates)


CORPUS: Final = Corpus(
    name="trecqa",
    description="TREC 8-13 questions; newswire sentences that share words with them",
    license="none stated (newswire, research only)",
    urls=("http://cs.jhu.edu/~xuchen/packages/jacana-qa-naacl2013-data-results.tar.bz2",),
    files=FILES,
    reader=read_tables,
    options_type=TRECQAOptions,
    published_counts=PUBLISHED_COUNTS,
    count_release=count_release,
)
