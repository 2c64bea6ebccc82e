"""TREC-QA (Wang, Smith and Mitamura 2007): factoid questions, newswire sentences.

Knows its JSON lines, its pseudo-XML and the variants that papers used. Must not know any other
corpus. In every file the positives of a question come first: a ranker that keeps the order of
the file looks perfect.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from as2ray.corpora.corpus import Corpus, PublishedCounts, ReleaseCount, Source
from as2ray.corpora.detokenize import detokenize as plain
from as2ray.corpora.trecqa_xml import parse_blocks
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import CANDIDATE_SCHEMA, TableCounts


class Variant(NamedTuple):
    """One of the versions that papers call TREC-QA."""

    folder: str
    max_tokens: dict[str, int]
    """For each split that is cut: candidates over so many whitespace tokens are left out."""


VARIANTS: Final = {
    "digits": Variant("", {}),
    "tanda": Variant("tanda", {"dev": 40}),
    "lexdecomp": Variant("tanda", {}),
}
"""Real digits; TANDA's (`<num>` for digits, dev cut at 40 tokens); the same files uncut."""

FILES: Final = {
    "train": ("train.jsonl", "TRAIN.xml", "train-less-than-40.manual-edit.xml"),
    "train-all": ("train-all.jsonl", "TRAIN-ALL.xml", "train2393.cleanup.xml"),
    "dev": ("dev.jsonl", "DEV.xml", "dev-less-than-40.manual-edit.xml"),
    "test": ("test.jsonl", "TEST.xml", "test-less-than-40.manual-edit.xml"),
}

QUESTION_COUNTS: Final = {"train": 94, "train-all": 1229, "dev": 82, "test": 100}
"""Questions a file lists; 1 of train, 1 of dev and 5 of test have no candidate at all."""

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


class RawQuestion(NamedTuple):
    """A question as a file has it."""

    id: str
    text: str
    candidates: list[tuple[str, int]]
    """Sentence and label."""


def read_tables(
    split: str, source: Source, *, variant: str = "digits", detokenize: bool = True
) -> Iterator[pa.Table]:
    """The split as one table; questions without candidates are not in it.

    Args:
        split: One of `FILES`.
        source: The folder (its `tanda/` holds the variants with `<num>`) or one file.
        variant: One of `VARIANTS`.
        detokenise: Whether Penn Treebank tokens become plain text.
    """
    if variant not in VARIANTS:
        raise CorpusError(
            f"unknown variant {variant!r} of TREC-QA; expected one of {list(VARIANTS)}",
            fix="digits has the real numbers, tanda is what the TANDA paper counts",
        )
    path = _find_file(Path(source), split, VARIANTS[variant].folder)
    longest = VARIANTS[variant].max_tokens.get(split)
    write = plain if detokenize else str
    rows = [
        (q.id, write(q.text), f"{q.id}-{k}", write(sentence), label)
        for q in _read_questions(path)
        for k, (sentence, label) in enumerate(q.candidates)
        if longest is None or len(sentence.split()) <= longest
    ]
    columns = list(zip(*rows)) or [()] * len(CANDIDATE_SCHEMA)
    yield pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, CANDIDATE_SCHEMA)], schema=CANDIDATE_SCHEMA
    )


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """The questions that each file lists, those without candidates too."""
    for split, published in QUESTION_COUNTS.items():
        for folder in ("", "tanda"):
            if path := raw_files.find_file(source / folder, FILES[split]):
                what = "listed questions" + (f" in {folder}" if folder else "")
                yield ReleaseCount(split, what, published, sum(1 for _ in _read_questions(path)))


def _find_file(source: Path, split: str, folder: str) -> Path:
    # The folder of a variant may also be given itself.
    inner = source / folder
    return raw_files.require_file(inner if inner.is_dir() else source, FILES[split])


def _read_questions(path: Path) -> Iterator[RawQuestion]:
    if path.name.removesuffix(".gz").endswith(".xml"):
        with raw_files.open_text(path) as lines:
            for id, text, candidates in parse_blocks(lines, str(path)):
                yield RawQuestion(id, text, candidates)
        return
    for line, record in raw_files.read_json_lines(path):
        with raw_files.value_errors(where := f"{path}, line {line:,}"):
            found = _parse_question(record, line, where)
        yield found


def _parse_question(record: Any, line_number: int, source: str) -> RawQuestion:
    text, candidates = raw_files.require_keys(record, ("question", "candidates"), source)
    pairs = [raw_files.require_keys(c, ("sentence", "label"), source) for c in candidates]
    wrong = [label for _, label in pairs if label not in (0, 1)]
    if wrong:
        raise CorpusError(
            f"{source}: label {wrong[0]!r}; expected label 0 or 1",
        )
    if odd := [said for said in (text, *(s for s, _ in pairs)) if not isinstance(said, str)]:
        raise CorpusError(
            f"{source}: {odd[0]!r}; expected text",
        )
    # The files with <num> have no ids; the position in the file is the same in every copy.
    return RawQuestion(str(record.get("id", f"q{line_number - 1:06d}")), text, pairs)


CORPUS: Final = Corpus(
    name="trecqa",
    description="TREC 8-13 questions; newswire sentences that share words with them",
    license="none stated (newswire, research only)",
    files=FILES,
    reader=read_tables,
    published_counts=PUBLISHED_COUNTS,
    count_release=count_release,
)
"""The corpus as the registry holds it."""
