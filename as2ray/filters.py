"""The question filters of the papers: raw, no_all_negative, clean.

Knows the candidates table. Corpora and evaluation both stand on it; must know neither.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from as2ray.errors import RecipeError
from as2ray.records import by_question

Filter = Literal["raw", "no_all_negative", "clean"]
"""Which questions count."""

FILTERS: Final[dict[str, str]] = {
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
    if name not in FILTERS:
        raise RecipeError(
            f"unknown filter {name!r}",
            expected="; ".join(f"{n} ({keeps})" for n, keeps in FILTERS.items()),
            mend="choose one of these",
        )
    return name


def filter_mask(table: pa.Table, name: str) -> npt.NDArray[np.bool_]:
    """Rows whose question passes the filter, shape [rows]; rows may come in any order."""
    if check_filter(name) == "raw" or table.num_rows == 0:
        return np.ones(table.num_rows, np.bool_)
    question = table["question_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    positives = np.bincount(question, table["label"].to_numpy())
    keep = positives > 0
    if name == "clean":
        keep &= positives < np.bincount(question)
    mask: npt.NDArray[np.bool_] = keep[question]
    return mask


def apply_filter(table: pa.Table, name: str) -> pa.Table:
    """The rows of the questions that the filter keeps, in their order.

    Args:
        table: A candidates table that holds its questions whole.
        name: One of `FILTERS`.
    """
    return table.filter(pa.array(filter_mask(table, name)))


def filtered(tables: Iterable[pa.Table], name: str) -> Iterator[pa.Table]:
    """`apply_filter` over a stream of tables that may be cut anywhere; none is empty."""
    check_filter(name)
    for table in by_question(tables):
        kept = apply_filter(table, name)
        if kept.num_rows:
            yield kept
