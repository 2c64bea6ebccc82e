"""What a candidates table is like: sizes, lengths, and the oddities that change a measure.

Knows the candidates table. Must not know any corpus or file.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError
from as2ray.tables.schema import TableCounts, count_table, question_offsets


@dataclass(frozen=True)
class Distribution:
    """How a number is spread over the rows."""

    mean: float
    median: float
    p95: float
    max: int


@dataclass(frozen=True)
class TableStats:
    """A candidates table in numbers."""

    counts: TableCounts
    candidates_per_question: Distribution
    num_all_negative: int
    """Questions without a positive candidate; no ranking of theirs can be right."""
    num_all_positive: int
    """Questions without a negative candidate; no ranking of theirs can be wrong."""
    question_tokens: Distribution
    """Whitespace tokens, over the questions."""
    candidate_tokens: Distribution
    """Whitespace tokens, over the pairs."""
    question_characters: Distribution
    candidate_characters: Distribution
    num_duplicate_sentences: int
    """Rows whose question has the same sentence in an earlier row."""
    num_conflicting_labels: int
    """Sentences that one question has with both labels."""
    num_duplicate_questions: int
    """Question texts that stand under more than one question id."""


def compute_stats(table: pa.Table) -> TableStats:
    """The numbers of a candidates table that holds its questions whole.

    Raises:
        CorpusError: It is empty.
    """
    if not table.num_rows:
        raise CorpusError(
            "a table without rows; expected at least one candidate",
            fix="look at the source",
        )
    starts = question_offsets(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    positives = np.add.reduceat(table["label"].to_numpy().astype(np.int64), starts)
    questions = table["question"].take(pa.array(starts))
    duplicates, conflicts = _count_duplicates(table)
    return TableStats(
        counts=count_table(table),
        candidates_per_question=_summarize(sizes),
        num_all_negative=int((positives == 0).sum()),
        num_all_positive=int((positives == sizes).sum()),
        question_tokens=_summarize(_count_tokens(questions)),
        candidate_tokens=_summarize(_count_tokens(table["candidate"])),
        question_characters=_summarize(pc.utf8_length(questions).to_numpy()),
        candidate_characters=_summarize(pc.utf8_length(table["candidate"]).to_numpy()),
        num_duplicate_sentences=duplicates,
        num_conflicting_labels=conflicts,
        num_duplicate_questions=_count_duplicate_questions(questions),
    )


def _count_tokens(texts: pa.ChunkedArray) -> np.ndarray:
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts))
    return np.asarray(pc.list_value_length(words).to_numpy())


def _summarize(values: np.ndarray) -> Distribution:
    median, p95 = np.percentile(values, [50, 95])
    return Distribution(float(values.mean()), float(median), float(p95), int(values.max()))


def _count_duplicates(table: pa.Table) -> tuple[int, int]:
    sentences = table.group_by(["question_id", "candidate"]).aggregate(
        [("label", "min"), ("label", "max")]
    )
    conflicts = pc.sum(pc.not_equal(sentences["label_min"], sentences["label_max"])).as_py()
    return table.num_rows - sentences.num_rows, int(conflicts or 0)


def _count_duplicate_questions(questions: pa.ChunkedArray) -> int:
    _, times = np.unique(questions.to_numpy().astype(str), return_counts=True)
    return int((times > 1).sum())
