"""What the commands share: the tables and numbers that they are given, and how results look.

Knows the terminal. Must not know any one command.
"""

import sys
from typing import Any, TypeVar

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from as2ray.corpora.preparation import read_split
from as2ray.corpora.registry import get_corpus
from as2ray.errors import ConfigError, EvaluationError
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import validate_table

Number = TypeVar("N", int, float)


def load_table(
    table: str | None,
    corpus: str | None,
    split: str,
    data_dir: str | None,
    corpus_options: dict[str, Any],
) -> pa.Table:
    """The candidates table that a user names, by its folder or its corpus.

    Raises:
        CorpusError: Not a candidates table, or no such corpus, split or options.
        EvaluationError: Both named, or none.
    """
    if (table is None) == (corpus is None):
        raise EvaluationError(
            f"table={table}, corpus={corpus}; expected one of the two",
        )
    if table is not None:
        return validate_table(ParquetTable.open(table).to_table(), table)
    return read_split(
        str(corpus), split, data_dir, **validate_corpus_options(str(corpus), corpus_options)
    )


def validate_corpus_options(corpus: str, corpus_options: dict[str, Any]) -> dict[str, Any]:
    """The options, if the corpus has such: no others may meet the arguments beside them."""
    get_corpus(corpus).resolve({str(name): value for name, value in corpus_options.items()})
    return corpus_options


def parse_drop_ratios(text: str | None) -> float | list[float] | None:
    """Drop ratios from `0.3` or `0.3,0.5`."""
    ratios = [] if text is None else parse_numbers(text, float)
    return ratios[0] if len(ratios) == 1 else ratios or None


def parse_numbers(text: str, number_type: type[Number]) -> list[Number]:
    """Numbers with commas between them."""
    try:
        return [number_type(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{text!r}; expected numbers with commas between them",
        ) from error


def create_console_table(*columns: str) -> Table:
    """A table to print."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    return shown


def create_console() -> Console:
    """Where to print."""
    terminal = sys.stdout.isatty()
    # Brackets and colons are the users': the names of their files.
    return Console(
        soft_wrap=not terminal, width=None if terminal else 160, markup=False, emoji=False
    )
