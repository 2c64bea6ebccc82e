"""Yahoo! Answers, non-factoid (nfL6): how-to questions and their answers.

Another selection of the release that Surdeanu et al. 2011 took theirs from, on which Mokrii et al.
work; without the asker's longer description, which they join to the question.

The answers that users gave to a question are its relevant documents; the other candidates are what
BM25 finds among the answers to all questions. The release has no splits: a hash of a question's
words gives them, so that the same words in another order are not divided (`leaks.near_duplicates`
names what is almost the same). Knows nfL6's JSON. Must not know any other corpus.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from as2ray.corpora import files
from as2ray.corpora.base import Corpus, Item, Source
from as2ray.errors import CorpusError
from as2ray.records import CANDIDATES, MAX_CHARACTERS
from as2ray.retrieval.bm25 import BM25, Index
from as2ray.text.likeness import words_of

NAMES: Final = ("nfL6.json", "nfL6_sample.json")
SPLITS: Final = {"train": 0.9, "dev": 0.95, "test": 1.0}
"""The upper end of each split's share of the hashes."""
SHOWN: Final = 64
"""Questions of a table that is handed on."""


class Asked(NamedTuple):
    """A question of the release."""

    id: str
    question: str
    answers: tuple[str, ...]


def reader(split: str, source: Source, *, depth: int = 100) -> Iterator[pa.Table]:
    """The questions of a split; their own answers first, then what BM25 finds of the others'.

    Args:
        split: One of `SPLITS`.
        source: The folder or one file.
        depth: Of BM25's list over all answers that are candidates.
    """
    if depth < 1:
        raise CorpusError(f"depth {depth}", expected="at least 1", mend="correct the option")
    path = files.locate(Path(source), NAMES)
    with files.sound(str(path)):
        yield from _tables(path, split, depth)


def _tables(path: Path, split: str, depth: int) -> Iterator[pa.Table]:
    every = list(_asked(path))
    texts = list(dict.fromkeys(text for asked in every for text in asked.answers))
    if not texts:
        raise CorpusError(f"{path}: no answer", expected="nfL6", mend="give the publisher's file")
    index = BM25().index(texts)
    own = [asked for asked in every if split_of(asked.question) == split]
    for start in range(0, len(own), SHOWN):
        yield _table(own[start : start + SHOWN], texts, index, depth)


def split_of(question: str) -> str:
    """The split of a question, by a hash of its different words: their order does not matter."""
    named = " ".join(sorted(words_of(question)))
    place = int.from_bytes(sha256(f"nfL6/{named}".encode()).digest()[:4]) / 2**32
    return next(split for split, end in SPLITS.items() if place < end)


def _asked(path: Path) -> Iterator[Asked]:
    seen: set[str] = set()
    for number, record in enumerate(files.json_records(path), 1):
        keys = ["id", "question", "nbestanswers"]
        id, question, answers = files.need(record, keys, f"{path}, question {number:,}")
        kept = tuple(dict.fromkeys(a[:MAX_CHARACTERS] for a in answers if a.strip()))
        if id in seen or not question.strip() or not kept:
            continue  # the release repeats some, and some have no text
        seen.add(id)
        yield Asked(str(id), question[:MAX_CHARACTERS], kept)


def _table(some: Sequence[Asked], texts: Sequence[str], index: Index, depth: int) -> pa.Table:
    rows = []
    for asked in some:
        found = (texts[hit.index] for hit in index.top(asked.question, depth))
        candidates = dict.fromkeys([*asked.answers, *found])
        relevant = set(asked.answers)
        rows += [
            (asked.id, asked.question, f"{asked.id}-{k}", text, int(text in relevant))
            for k, text in enumerate(candidates)
        ]
    return pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows), CANDIDATES)], CANDIDATES)


def inventory(source: Path) -> Iterator[Item]:
    """Questions and answers of the sample, as counted."""
    path = files.present(source, NAMES[1:])
    if path and path.name.startswith(NAMES[1]):
        records = list(files.json_records(path))
        yield Item("", "questions", 109, len(records))
        yield Item("", "answers", 280, sum(len(r["nbestanswers"]) for r in records))


CORPUS: Final = Corpus(
    name="yahoo_answers",
    about="How-to questions of a community; their answers, among what BM25 finds of all answers",
    licence="Yahoo! Webscope, research only",
    files=dict.fromkeys(SPLITS, NAMES),
    reader=reader,
    inventory=inventory,
)
"""The corpus as the registry holds it."""
