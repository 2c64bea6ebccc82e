"""The question filters of the papers: raw, no_all_negative, clean.

Knows the candidates table. Must not know any corpus or file.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from as2ray.errors import CorpusError
from as2ray.records import by_question, question_starts

FILTERS: Final = {
    "raw": "every question",
    "no_all_negative": "questions with at least one positive candidate",
    "clean": "questions with at least one positive and at least one negative candidate",
}
"""The names of the filters and what each keeps (TANDA, Table 2)."""


def check_filter(name: str) -> str:
    """The name, if it is a filter's.

    Raises:
        CorpusError: It is not.
    """
    if name not in FILTERS:
        raise CorpusError(
            f"unknown filter {name!r}",
            expected="; ".join(f"{n} ({keeps})" for n, keeps in FILTERS.items()),
            mend="choose one of these",
        )
    return name


def apply_filter(table: pa.Table, name: str) -> pa.Table:
    """The rows of the questions that the filter keeps, in their order.

    Args:
        table: A candidates table that holds its questions whole.
        name: One of `FILTERS`.
    """
    if check_filter(name) == "raw" or table.num_rows == 0:
        return table
    starts = question_starts(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    positives = np.add.reduceat(table["label"].to_numpy().astype(np.int64), starts)
    keep = positives > 0
    if name == "clean":
        keep &= positives < sizes
    return table.filter(pa.array(np.repeat(keep, sizes)))


def filtered(tables: Iterable[pa.Table], name: str) -> Iterator[pa.Table]:
    """`apply_filter` over a stream of tables that may be cut anywhere; none is empty."""
    check_filter(name)
    for table in by_question(tables):
        kept = apply_filter(table, name)
        if kept.num_rows:
            yield kept
