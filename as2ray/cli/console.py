"""Input tables, files of lines, number flags and output tables of the commands."""

import gzip
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from as2ray.errors import ConfigError, CorpusError, EvaluationError

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console
    from rich.table import Table

Number = TypeVar("Number", int, float)


def load_table(
    table: str | None,
    corpus: str | None,
    split: str,
    data_dir: str | None,
    corpus_options: dict[str, Any],
    columns: Mapping[str, str] | None = None,
    min_positive_grade: float | None = None,
) -> "pa.Table":
    """Loads the candidates table of a file or folder, or of a split of a corpus.

    Raises:
        ConfigError: There is no such corpus, split or option.
        CorpusError: The folder or the corpus does not hold a candidates table.
        EvaluationError: Both or neither of `table` and `corpus` are given, or a grade of a corpus.
    """
    if (table is None) == (corpus is None):
        raise EvaluationError(f"give either --table or --corpus (table={table}, corpus={corpus})")
    if table is not None:
        from as2ray.tables import loading

        return loading.load_table(table, columns=columns, min_positive_grade=min_positive_grade)
    if min_positive_grade is not None:
        raise EvaluationError(
            f"min_positive_grade={min_positive_grade:g} with corpus={corpus}; a corpus has labels",
            fix="leave it out, or give --table",
        )
    from as2ray.corpora.preparation import read_split

    name = str(corpus)
    return read_split(name, split, data_dir, **validate_corpus_options(name, corpus_options))


def validate_corpus_options(corpus: str, corpus_options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options, if the corpus has them and accepts their values.

    Without this check an option could have the name of another argument of the same call.

    Raises:
        ConfigError: There is no such corpus or option, or a value is not accepted.
    """
    from as2ray.corpora.registry import get_corpus

    get_corpus(corpus).parse_options({str(name): v for name, v in corpus_options.items()})
    return corpus_options


def explain_missing_scoring(model: str, output: str) -> str | None:
    """Returns that the fitted scoring of answers beside a ranker was not copied; None without."""
    from as2ray.retrieval.answer_scoring import FILE

    if not (Path(model) / FILE).is_file():
        return None
    return (
        f"{output} has no {FILE}: that of {model} was fitted to other scores. With {output} "
        "`as2ray ask` always asks the ranker"
    )


def parse_drop_ratios(text: str | None) -> float | list[float] | None:
    """Parses drop ratios: `0.3` for all stages, or `0.3,0.5` for each."""
    ratios = [] if text is None else parse_numbers(text, float)
    return ratios[0] if len(ratios) == 1 else ratios or None


def parse_numbers(text: str, number_type: type[Number]) -> list[Number]:
    """Parses numbers that are separated by commas.

    Raises:
        ConfigError: A part is not such a number.
    """
    try:
        return [number_type(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a list of numbers with commas between them") from error


def create_console_table(*columns: str) -> "Table":
    """Creates a table to print."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def create_console() -> "Console":
    """Creates a console that prints text as it is."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    # File names may contain brackets and colons, which are not markup or emoji codes.
    return Console(
        soft_wrap=not is_terminal, width=None if is_terminal else 160, markup=False, emoji=False
    )


def read_text(path: str | Path) -> str:
    """Reads a text file, decompressed if its name ends in `.gz`, as tables are.

    Raises:
        CorpusError: It is not a file of UTF-8 text.
    """
    open_file: Callable[..., IO[str]] = gzip.open if Path(path).suffix == ".gz" else open
    try:
        with open_file(path, "rt", encoding="utf-8") as file:
            return file.read().removeprefix("\ufeff")  # Some editors write a byte order mark.
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read as a file of UTF-8 text: {error}") from error


def read_lines(path: str) -> list[str]:
    """Reads the lines of a file that are not blank; `-` reads standard input.

    Raises:
        CorpusError: It is not a file of UTF-8 text.
    """
    text = sys.stdin.read() if path == "-" else read_text(path)
    # Not splitlines: a sentence may contain U+2028, which is not the end of a line here.
    lines = text.removeprefix("\ufeff").split("\n")
    return [line.strip() for line in lines if line.strip()]
