"""The question filters of the papers: raw, no_all_negative, clean.

Knows the candidates table. Corpora and evaluation both stand on it; must know neither.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import ConfigError
from as2ray.tables.schema import split_by_question

QuestionFilter = Literal["raw", "no_all_negative", "clean"]
"""Which questions count."""

FILTER_DESCRIPTIONS: Final[dict[str, str]] = {
    "raw": "every question",
    "no_all_negative": "questions with at least one positive candidate",
    "clean": "questions with at least one positive and at least one negative candidate",
}
"""The names of the filters and what each keeps (TANDA, Table 2)."""


def check_filter(name: str) -> str:
    """The name, if it is a filter's.

    Raises:
        RecipeError: It is not.
    """
    if name not in FILTER_DESCRIPTIONS:
        raise ConfigError(
            f"unknown filter {name!r}"
            + "; expected "
            + "; ".join(f"{n} ({keeps})" for n, keeps in FILTER_DESCRIPTIONS.items()),
        )
    return name


def filter_mask(table: pa.Table, question_filter: str) -> npt.NDArray[np.bool_]:
    """Rows whose question passes the filter, shape [rows]; rows may come in any order."""
    if check_filter(question_filter) == "raw" or table.num_rows == 0:
        return np.ones(table.num_rows, np.bool_)
    question = table["question_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    positives = np.bincount(question, table["label"].to_numpy())
    keep = positives > 0
    if question_filter == "clean":
        keep &= positives < np.bincount(question)
    mask: npt.NDArray[np.bool_] = keep[question]
    return mask


def filter_table(table: pa.Table, question_filter: str) -> pa.Table:
    """The rows of the questions that the filter keeps, in their order.

    Args:
        table: A candidates table that holds its questions whole.
        name: One of `FILTERS`.
    """
    return table.filter(pa.array(filter_mask(table, question_filter)))


def filter_tables(tables: Iterable[pa.Table], question_filter: str) -> Iterator[pa.Table]:
    """`apply_filter` over a stream of tables that may be cut anywhere; none is empty."""
    check_filter(question_filter)
    for table in split_by_question(tables):
        kept = filter_table(table, question_filter)
        if kept.num_rows:
            yield kept
