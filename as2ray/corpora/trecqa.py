"""TREC-QA (Wang, Smith and Mitamura 2007): factoid questions, newswire sentences.

Knows its JSON lines, its pseudo-XML and the variants that papers used. Must not know any other
corpus. In every file the positives of a question come first: a ranker that keeps the order of
the file looks perfect.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from as2ray.corpora import files
from as2ray.corpora.base import Corpus, Item, Published, Source
from as2ray.corpora.detokenise import detokenise as plain
from as2ray.corpora.trecqa_xml import blocks
from as2ray.errors import CorpusError
from as2ray.records import CANDIDATES, Counts


class Variant(NamedTuple):
    """One of the versions that papers call TREC-QA."""

    folder: str
    longest: dict[str, int]
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

QUESTIONS: Final = {"train": 94, "train-all": 1229, "dev": 82, "test": 100}
"""Questions a file lists; 1 of train, 1 of dev and 5 of test have no candidate at all."""

PUBLISHED: Final = tuple(
    Published(split, filter, Counts(*numbers), {"variant": variant})
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


class Question(NamedTuple):
    """A question as a file has it."""

    id: str
    text: str
    candidates: list[tuple[str, int]]
    """Sentence and label."""


def reader(
    split: str, source: Source, *, variant: str = "digits", detokenise: bool = True
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
            f"unknown variant {variant!r} of TREC-QA",
            expected=f"one of {list(VARIANTS)}",
            mend="digits has the real numbers, tanda is what the TANDA paper counts",
        )
    path = _path(Path(source), split, VARIANTS[variant].folder)
    longest = VARIANTS[variant].longest.get(split)
    write = plain if detokenise else str
    rows = [
        (q.id, write(q.text), f"{q.id}-{k}", write(sentence), label)
        for q in _questions(path)
        for k, (sentence, label) in enumerate(q.candidates)
        if longest is None or len(sentence.split()) <= longest
    ]
    columns = list(zip(*rows)) or [()] * len(CANDIDATES)
    yield pa.table([pa.array(c, f.type) for c, f in zip(columns, CANDIDATES)], schema=CANDIDATES)


def inventory(source: Path) -> Iterator[Item]:
    """The questions that each file lists, those without candidates too."""
    for split, published in QUESTIONS.items():
        for folder in ("", "tanda"):
            if path := files.present(source / folder, FILES[split]):
                what = "listed questions" + (f" in {folder}" if folder else "")
                yield Item(split, what, published, sum(1 for _ in _questions(path)))


def _path(source: Path, split: str, folder: str) -> Path:
    # The folder of a variant may also be given itself.
    inner = source / folder
    return files.locate(inner if inner.is_dir() else source, FILES[split])


def _questions(path: Path) -> Iterator[Question]:
    if path.name.removesuffix(".gz").endswith(".xml"):
        with files.opened(path) as lines:
            for id, text, candidates in blocks(lines, str(path)):
                yield Question(id, text, candidates)
        return
    for line, record in files.json_lines(path):
        with files.sound(where := f"{path}, line {line:,}"):
            found = _question(record, line, where)
        yield found


def _question(record: Any, line: int, where: str) -> Question:
    text, candidates = files.need(record, ("question", "candidates"), where)
    pairs = [files.need(c, ("sentence", "label"), where) for c in candidates]
    wrong = [label for _, label in pairs if label not in (0, 1)]
    if wrong:
        raise CorpusError(
            f"{where}: label {wrong[0]!r}", expected="label 0 or 1", mend="correct the line"
        )
    if odd := [said for said in (text, *(s for s, _ in pairs)) if not isinstance(said, str)]:
        raise CorpusError(f"{where}: {odd[0]!r}", expected="text", mend="correct the line")
    # The files with <num> have no ids; the position in the file is the same in every copy.
    return Question(str(record.get("id", f"q{line - 1:06d}")), text, pairs)


CORPUS: Final = Corpus(
    name="trecqa",
    about="TREC 8-13 questions; newswire sentences that share words with them",
    licence="none stated (newswire, research only)",
    files=FILES,
    reader=reader,
    published=PUBLISHED,
    inventory=inventory,
)
"""The corpus as the registry holds it."""
