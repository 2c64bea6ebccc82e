"""Statistics of a candidates table: sizes, lengths, and properties that change a measure."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError
from as2ray.tables.schema import TableCounts, count_table, question_offsets

CountTokens = Callable[[pa.ChunkedArray], np.ndarray]
"""Returns the number of tokens of each text, shape [texts]."""


@dataclass(frozen=True)
class Distribution:
    """Mean, median, 95th percentile and maximum of a number."""

    mean: float
    median: float
    p95: float
    max: int


@dataclass(frozen=True)
class TableStats:
    """Statistics of a candidates table."""

    counts: TableCounts
    candidates_per_question: Distribution
    positives_per_question: Distribution
    num_all_negative: int
    """Questions without a positive candidate; no ranking of theirs is right."""
    num_all_positive: int
    """Questions without a negative candidate; every ranking of theirs is right."""
    question_tokens: Distribution
    """Tokens of a question: word pieces of a tokenizer, or separated by white space."""
    candidate_tokens: Distribution
    """Tokens of a candidate, counted in the same way."""
    question_characters: Distribution
    candidate_characters: Distribution
    num_duplicate_sentences: int
    """Rows whose sentence the same question also has in an earlier row."""
    num_conflicting_labels: int
    """Sentences that have both labels for the same question."""
    num_duplicate_questions: int
    """Question texts with more than one question id."""


def compute_stats(table: pa.Table, count_tokens: CountTokens | None = None) -> TableStats:
    """Computes the statistics of a candidates table.

    Args:
        table: All candidates of its questions, rows of a question adjacent.
        count_tokens: Counts the tokens of each text; by default white space separates them.

    Raises:
        CorpusError: The table is empty.
    """
    if not table.num_rows:
        raise CorpusError("cannot compute statistics of a table without rows")
    starts = question_offsets(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    num_positives = np.add.reduceat(table["label"].to_numpy().astype(np.int64), starts)
    questions = table["question"].take(pa.array(starts))
    num_duplicates, num_conflicts = _count_duplicates(table)
    count_tokens = count_tokens or _count_words
    return TableStats(
        counts=count_table(table),
        candidates_per_question=_summarize(sizes),
        positives_per_question=_summarize(num_positives),
        num_all_negative=int((num_positives == 0).sum()),
        num_all_positive=int((num_positives == sizes).sum()),
        question_tokens=_summarize(count_tokens(questions)),
        candidate_tokens=_summarize(count_tokens(table["candidate"])),
        question_characters=_summarize(pc.utf8_length(questions).to_numpy()),
        candidate_characters=_summarize(pc.utf8_length(table["candidate"]).to_numpy()),
        num_duplicate_sentences=num_duplicates,
        num_conflicting_labels=num_conflicts,
        num_duplicate_questions=_count_duplicate_questions(questions),
    )


def _count_words(texts: pa.ChunkedArray) -> np.ndarray:
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts))
    return np.asarray(pc.list_value_length(words).to_numpy())


def _summarize(values: np.ndarray) -> Distribution:
    median, p95 = np.percentile(values, [50, 95])
    return Distribution(float(values.mean()), float(median), float(p95), int(values.max()))


def _count_duplicates(table: pa.Table) -> tuple[int, int]:
    """Returns the number of repeated sentences and of sentences with both labels."""
    bounds = [("label", "min"), ("label", "max")]
    sentences = table.group_by(["question_id", "candidate"]).aggregate(bounds)
    num_conflicts = pc.sum(pc.not_equal(sentences["label_min"], sentences["label_max"])).as_py()
    return table.num_rows - sentences.num_rows, int(num_conflicts or 0)


def _count_duplicate_questions(questions: pa.ChunkedArray) -> int:
    _, num_ids = np.unique(questions.to_numpy().astype(str), return_counts=True)
    return int((num_ids > 1).sum())
