"""What a candidates table is like: sizes, lengths, and the oddities that change a measure.

Knows the candidates table. Must not know any corpus or file.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError
from as2ray.records import Counts, count, question_starts


@dataclass(frozen=True)
class Spread:
    """How a number is spread over the rows."""

    mean: float
    median: float
    p95: float
    most: int


@dataclass(frozen=True)
class Stats:
    """A candidates table in numbers."""

    counts: Counts
    candidates_per_question: Spread
    all_negative: int
    """Questions without a positive candidate; no ranking of theirs can be right."""
    all_positive: int
    """Questions without a negative candidate; no ranking of theirs can be wrong."""
    question_tokens: Spread
    """Whitespace tokens, over the questions."""
    candidate_tokens: Spread
    """Whitespace tokens, over the pairs."""
    question_characters: Spread
    candidate_characters: Spread
    duplicate_sentences: int
    """Rows whose question has the same sentence in an earlier row."""
    conflicting_sentences: int
    """Sentences that one question has with both labels."""
    texts_with_two_ids: int
    """Question texts that stand under more than one question id."""


def stats(table: pa.Table) -> Stats:
    """The numbers of a candidates table that holds its questions whole.

    Raises:
        CorpusError: It is empty.
    """
    if not table.num_rows:
        raise CorpusError(
            "a table without rows", expected="at least one candidate", mend="look at the source"
        )
    starts = question_starts(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    positives = np.add.reduceat(table["label"].to_numpy().astype(np.int64), starts)
    questions = table["question"].take(pa.array(starts))
    duplicates, conflicts = _repeated(table)
    return Stats(
        counts=count(table),
        candidates_per_question=_spread(sizes),
        all_negative=int((positives == 0).sum()),
        all_positive=int((positives == sizes).sum()),
        question_tokens=_spread(_tokens(questions)),
        candidate_tokens=_spread(_tokens(table["candidate"])),
        question_characters=_spread(pc.utf8_length(questions).to_numpy()),
        candidate_characters=_spread(pc.utf8_length(table["candidate"]).to_numpy()),
        duplicate_sentences=duplicates,
        conflicting_sentences=conflicts,
        texts_with_two_ids=_twice(questions),
    )


def _tokens(texts: pa.ChunkedArray) -> np.ndarray:
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts))
    return np.asarray(pc.list_value_length(words).to_numpy())


def _spread(values: np.ndarray) -> Spread:
    median, p95 = np.percentile(values, [50, 95])
    return Spread(float(values.mean()), float(median), float(p95), int(values.max()))


def _repeated(table: pa.Table) -> tuple[int, int]:
    sentences = table.group_by(["question_id", "candidate"]).aggregate(
        [("label", "min"), ("label", "max")]
    )
    conflicts = pc.sum(pc.not_equal(sentences["label_min"], sentences["label_max"])).as_py()
    return table.num_rows - sentences.num_rows, int(conflicts or 0)


def _twice(questions: pa.ChunkedArray) -> int:
    _, times = np.unique(questions.to_numpy().astype(str), return_counts=True)
    return int((times > 1).sum())
