"""What the commands share: the tables and numbers that they are given, and how results look.

Knows the terminal. Must not know any one command.
"""

import sys
from typing import Any, TypeVar

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from as2ray import corpora
from as2ray.errors import EvaluationError, RecipeError
from as2ray.records import validate
from as2ray.text.files import PairFiles

N = TypeVar("N", int, float)


def rows_of(
    table: str | None,
    corpus: str | None,
    split: str,
    source: str | None,
    options: dict[str, Any],
) -> pa.Table:
    """The candidates table that a user names, by its folder or its corpus.

    Raises:
        CorpusError: Not a candidates table, or no such corpus, split or options.
        EvaluationError: Both named, or none.
    """
    if (table is None) == (corpus is None):
        raise EvaluationError(
            f"table={table}, corpus={corpus}", expected="one of the two", mend="give one"
        )
    if table is not None:
        return validate(PairFiles.find(table).table(), table)
    return corpora.read(str(corpus), split, source, **known_options(str(corpus), options))


def known_options(corpus: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, if the corpus has such: no others may meet the arguments beside them."""
    corpora.get(corpus).resolve({str(name): value for name, value in options.items()})
    return options


def ratios_of(drop: str | None) -> float | list[float] | None:
    """Drop ratios from `0.3` or `0.3,0.5`."""
    ratios = [] if drop is None else numbers_of(drop, float)
    return ratios[0] if len(ratios) == 1 else ratios or None


def numbers_of(text: str, kind: type[N]) -> list[N]:
    """Numbers with commas between them."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise RecipeError(
            f"{text!r}", expected="numbers with commas between them", mend="correct it"
        ) from error


def table_of(*columns: str) -> Table:
    """A table to print."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    return shown


def console() -> Console:
    """Where to print."""
    terminal = sys.stdout.isatty()
    # Brackets and colons are the users': the names of their files.
    return Console(
        soft_wrap=not terminal, width=None if terminal else 160, markup=False, emoji=False
    )
