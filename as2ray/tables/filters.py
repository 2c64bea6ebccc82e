"""Question filters of the papers: raw, no_all_negative and clean."""

from collections.abc import Iterable, Iterator
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import lookup
from as2ray.tables.schema import question_indices, split_by_question

QuestionFilter = Literal["raw", "no_all_negative", "clean"]
"""Which questions count."""

FILTER_DESCRIPTIONS: Final[dict[str, str]] = {
    "raw": "every question",
    "no_all_negative": "questions with at least one positive candidate",
    "clean": "questions with at least one positive and at least one negative candidate",
}
"""What each filter keeps, by its name (TANDA, Table 2)."""


def filter_mask(table: pa.Table, question_filter: str) -> npt.NDArray[np.bool_]:
    """Returns which rows belong to a question that passes the filter, shape [rows].

    Args:
        table: A candidates table with all candidates of its questions, in any order.
        question_filter: A name in `FILTER_DESCRIPTIONS`.

    Raises:
        ConfigError: Unknown filter.
    """
    lookup(FILTER_DESCRIPTIONS, question_filter, "filter")
    if question_filter == "raw" or table.num_rows == 0:
        return np.ones(table.num_rows, np.bool_)
    question_index = question_indices(table)
    num_positives = np.bincount(question_index, table["label"].to_numpy())
    passes = num_positives > 0
    if question_filter == "clean":
        passes &= num_positives < np.bincount(question_index)
    return np.asarray(passes[question_index])


def filter_table(table: pa.Table, question_filter: str) -> pa.Table:
    """Returns the rows of the questions that pass the filter, in their order.

    Args:
        table: A candidates table with all candidates of its questions.
        question_filter: A name in `FILTER_DESCRIPTIONS`.

    Raises:
        ConfigError: Unknown filter.
    """
    return table.filter(pa.array(filter_mask(table, question_filter)))


def filter_tables(tables: Iterable[pa.Table], question_filter: str) -> Iterator[pa.Table]:
    """Applies `filter_table` to a stream of tables that may be cut inside a question.

    Yields:
        The rows that remain, in tables that are not empty.

    Raises:
        ConfigError: Unknown filter.
    """
    lookup(FILTER_DESCRIPTIONS, question_filter, "filter")
    for table in split_by_question(tables):
        filtered = filter_table(table, question_filter)
        if filtered.num_rows:
            yield filtered
