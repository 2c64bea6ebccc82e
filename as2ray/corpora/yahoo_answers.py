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

from as2ray.corpora.corpus import Corpus, ReleaseCount, Source
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import CANDIDATE_SCHEMA, MAX_TEXT_CHARS
from as2ray.text.bm25 import BM25, BM25Index
from as2ray.text.word_overlap import word_set

FILE_NAMES: Final = ("nfL6.json", "nfL6_sample.json")
SPLITS: Final = {"train": 0.9, "dev": 0.95, "test": 1.0}
"""The upper end of each split's share of the hashes."""
QUESTIONS_PER_TABLE: Final = 64
"""Questions of a table that is handed on."""


class RawQuestion(NamedTuple):
    """A question of the release."""

    id: str
    question: str
    answers: tuple[str, ...]


def read_tables(split: str, source: Source, *, run_depth: int = 100) -> Iterator[pa.Table]:
    """The questions of a split; their own answers first, then what BM25 finds of the others'.

    Args:
        split: One of `SPLITS`.
        source: The folder or one file.
        depth: Of BM25's list over all answers that are candidates.
    """
    if run_depth < 1:
        raise CorpusError(
            f"depth {run_depth}; expected at least 1",
        )
    path = raw_files.require_file(Path(source), FILE_NAMES)
    with raw_files.value_errors(str(path)):
        yield from _build_tables(path, split, run_depth)


def _build_tables(path: Path, split: str, depth: int) -> Iterator[pa.Table]:
    every = list(_read_questions(path))
    texts = list(dict.fromkeys(text for asked in every for text in asked.answers))
    if not texts:
        raise CorpusError(
            f"{path}: no answer; expected nfL6",
            fix="give the publisher's file",
        )
    index = BM25().build_index(texts)
    own = [asked for asked in every if assign_split(asked.question) == split]
    for start in range(0, len(own), QUESTIONS_PER_TABLE):
        yield _build_table(own[start : start + QUESTIONS_PER_TABLE], texts, index, depth)


def assign_split(question: str) -> str:
    """The split of a question, by a hash of its different words: their order does not matter."""
    named = " ".join(sorted(word_set(question)))
    place = int.from_bytes(sha256(f"nfL6/{named}".encode()).digest()[:4]) / 2**32
    return next(split for split, end in SPLITS.items() if place < end)


def _read_questions(path: Path) -> Iterator[RawQuestion]:
    seen: set[str] = set()
    for number, record in enumerate(raw_files.read_json_records(path), 1):
        keys = ["id", "question", "nbestanswers"]
        id, question, answers = raw_files.require_keys(record, keys, f"{path}, question {number:,}")
        kept = tuple(dict.fromkeys(a[:MAX_TEXT_CHARS] for a in answers if a.strip()))
        if id in seen or not question.strip() or not kept:
            continue  # the release repeats some, and some have no text
        seen.add(id)
        yield RawQuestion(str(id), question[:MAX_TEXT_CHARS], kept)


def _build_table(
    questions: Sequence[RawQuestion], texts: Sequence[str], index: BM25Index, depth: int
) -> pa.Table:
    rows = []
    for asked in questions:
        found = (texts[hit.index] for hit in index.search(asked.question, depth))
        candidates = dict.fromkeys([*asked.answers, *found])
        relevant = set(asked.answers)
        rows += [
            (asked.id, asked.question, f"{asked.id}-{k}", text, int(text in relevant))
            for k, text in enumerate(candidates)
        ]
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(zip(*rows), CANDIDATE_SCHEMA)], CANDIDATE_SCHEMA
    )


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Questions and answers of the sample, as counted."""
    path = raw_files.find_file(source, FILE_NAMES[1:])
    if path and path.name.startswith(FILE_NAMES[1]):
        records = list(raw_files.read_json_records(path))
        yield ReleaseCount("", "questions", 109, len(records))
        yield ReleaseCount("", "answers", 280, sum(len(r["nbestanswers"]) for r in records))


CORPUS: Final = Corpus(
    name="yahoo_answers",
    description="How-to questions of a community; their answers, among what BM25 finds of all answers",
    license="Yahoo! Webscope, research only",
    files=dict.fromkeys(SPLITS, FILE_NAMES),
    reader=read_tables,
    count_release=count_release,
)
"""The corpus as the registry holds it."""
