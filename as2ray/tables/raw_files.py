"""Raw files: finding them, opening them, reading tab columns and JSON, with typed errors.

Knows files, gzip and the hub. Must not know any corpus.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv as csv

from as2ray.errors import CorpusError

BLOCK_BYTES = 8 << 20
"""Bytes of a tab-separated file that are read at a time."""


class RawFileNotFoundError(CorpusError):
    """A file of a raw release does not lie where it was looked for."""


def find_file(source: Path, names: Sequence[str]) -> Path | None:
    """The first of `names` (or of them with `.gz`) in a folder; the source if it is a file."""
    if source.is_file():
        return source
    tried = (source / (name + ending) for name in names for ending in ("", ".gz"))
    return next((path for path in tried if path.is_file()), None)


def require_file(source: Path, names: Sequence[str]) -> Path:
    """As `present`, but the file must be there.

    Raises:
        SourceMissingError: It is not.
    """
    path = find_file(source, names)
    if path is None:
        raise RawFileNotFoundError(
            f"no {' or '.join(names)} (or with .gz) in {source}"
            "; expected the raw file as its publisher released it",
            fix="put it there, give another folder, or set AS2RAY_DATA",
        )
    return path


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """A text file, unpacked if it ends in `.gz`; only `\\n` ends a line, and a mark of the byte
    order at its start is no text.

    Raises:
        CorpusError: The file is cut short or is not UTF-8.
    """
    with file_errors(path):
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="\n") as text:
                yield text
        else:
            with open(path, encoding="utf-8-sig", newline="\n") as text:
                yield text


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turns what a damaged file causes inside the block into a `CorpusError`."""
    try:
        yield
    except (EOFError, zlib.error, UnicodeDecodeError, OSError, pa.ArrowInvalid) as error:
        raise CorpusError(
            f"{path}: {' '.join(str(error).split())[:300]}; expected a whole file in UTF-8",
            fix="fetch the file again and compare its size with the publisher's",
        ) from error


@contextmanager
def value_errors(source: str) -> Iterator[None]:
    """Turns what values of other types cause inside the block into a `CorpusError`.

    Args:
        where: What is read, for the error.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CorpusError(
            (f"{source}: {type(error).__name__}: {error}"[:300])
            + "; expected values of the types that the publisher wrote, text that is Unicode",
            fix="give the publisher's own file",
        ) from error


def read_tsv(path: Path, columns: Sequence[str], has_header: bool) -> Iterator[pa.Table]:
    """Streams a tab-separated file as tables of strings. Quotation marks are plain characters.

    Args:
        path: The file, maybe with `.gz`.
        columns: The names and number of the columns.
        header: Whether the first line holds exactly these names.

    Raises:
        CorpusError: Another header, a line with another number of columns, a damaged file.
    """
    names = None if has_header else list(columns)
    with file_errors(path):
        reader = csv.open_csv(
            path,
            read_options=csv.ReadOptions(column_names=names, block_size=BLOCK_BYTES),
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=csv.ConvertOptions(
                column_types={name: pa.string() for name in columns}, strings_can_be_null=False
            ),
        )
        if reader.schema.names != list(columns):
            raise CorpusError(
                f"{path}: columns {reader.schema.names}; expected {str(list(columns))}",
                fix="give the publisher's own file, tab-separated, with its header",
            )
        for batch in reader:
            yield pa.Table.from_batches([batch])


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a file with one JSON value a line, with line numbers from 1.

    Blank lines hold no value, and count.

    Raises:
        CorpusError: A line that is no JSON, a damaged file.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise json_error(path, number, error) from error
            except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
                raise CorpusError(
                    f"{path}, line {number:,}: {error}; expected JSON values that can be held",
                ) from error
            yield number, value


def read_json_records(path: Path, block_size: int = 1 << 20) -> Iterator[Any]:
    """The values of a JSON list, or of a file with one JSON value a line, without holding it all.

    Args:
        path: The file, maybe with `.gz`.
        block: Characters that are read at a time.

    Raises:
        CorpusError: No JSON, or the file is cut short.
    """
    decoder, text, done = json.JSONDecoder(), "", 0
    with open_text(path) as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        text = "" if start == "[" else start
        while True:
            piece = file.read(block_size)
            text = text.lstrip(" \t\r\n,") + piece
            text = text.lstrip(" \t\r\n,")
            while text and not text.startswith("]"):
                try:
                    value, end = decoder.raw_decode(text)
                except json.JSONDecodeError as error:
                    if piece:
                        break  # the value goes on in the next block
                    raise json_error(path, done + 1, error) from error
                yield value
                done += 1
                text = text[end:].lstrip(" \t\r\n,")
            if not piece:
                break
    if start == "[" and not text.startswith("]"):
        raise CorpusError(
            f"{path}: a list that does not end after {done:,} values; expected a whole JSON list",
            fix="fetch the file again; it is cut short",
        )


def read_json_file(path: Path) -> Any:
    """The one JSON value of a file.

    Raises:
        CorpusError: The file is no JSON or is cut short.
    """
    with open_text(path) as text:
        try:
            return json.load(text)
        except json.JSONDecodeError as error:
            raise json_error(path, error.lineno, error) from error


def json_error(path: Path, line: int, error: json.JSONDecodeError) -> CorpusError:
    """The error for a line that cannot be read as JSON."""
    return CorpusError(
        f"{path}, line {line:,}: {error.msg} at character {error.pos:,}"
        "; expected whole JSON values",
        fix="fetch the file again; it is cut short or was changed",
    )


def require_keys(record: Any, keys: Iterable[str], source: str) -> tuple[Any, ...]:
    """The values of `keys` in a JSON object.

    Raises:
        CorpusError: It is no object, or keys are missing.
    """
    missing = [k for k in keys if not isinstance(record, dict) or k not in record]
    if missing:
        came = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise CorpusError(
            f"{source}: {came}, without {missing}; expected an object with {list(keys)}",
            fix="give the publisher's own file",
        )
    return tuple(record[k] for k in keys)


def read_hub(name: str, split: str, config: str | None = None) -> Iterator[pa.Table]:
    """Streams a split of a dataset of the Hugging Face hub as Arrow tables.

    `datasets` keeps its own copy on disk and maps it into memory, so a large one fits.
    """
    from datasets import load_dataset

    yield from iter_arrow(load_dataset(name, config, split=split))


def iter_arrow(dataset: Any, batch_size: int = 65_536) -> Iterator[pa.Table]:
    """The rows of a `datasets.Dataset` as Arrow tables of at most `rows` rows."""
    for table in dataset.with_format("arrow").iter(batch_size=batch_size):
        yield pa.table(table) if isinstance(table, dict) else table
