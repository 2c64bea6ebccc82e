"""Finds, opens and reads raw files: tab-separated, JSON and Hugging Face datasets."""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from pyarrow import csv

from as2ray.errors import CorpusError
from as2ray.tables.hub_connection import offline_without_connection

HUB_COPIES = "AS2RAY_HUB"
"""Environment variable with the path of a folder of datasets in the layout of the hub."""

BLOCK_BYTES = 8 << 20
"""Bytes of a tab-separated file that are read at once."""


class RawFileNotFoundError(CorpusError):
    """A file of a raw release is missing."""


def find_file(source: Path, names: Sequence[str]) -> Path | None:
    """Returns the first existing file of `names`, with or without `.gz`.

    Args:
        source: A folder, or the file itself, which is returned whatever its name.
        names: File names, in order of preference.
    """
    if source.is_file():
        return source
    paths = (source / (name + suffix) for name in names for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def require_file(source: Path, names: Sequence[str]) -> Path:
    """Returns the path that `find_file` finds.

    Raises:
        RawFileNotFoundError: There is no such file.
    """
    path = find_file(source, names)
    if path is None:
        raise RawFileNotFoundError(
            f"no {' or '.join(names)} (or with .gz) in {source}",
            fix="put the published file there, give another folder, or set AS2RAY_DATA; for a job, "
            """by --runtime-env-json '{"env_vars": {"AS2RAY_DATA": "/shared/data"}}'""",
        )
    return path


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Opens a text file, decompressed if its name ends in `.gz`.

    Only a line feed ends a line. A byte order mark at the start is skipped.

    Raises:
        CorpusError: The file is truncated or is not UTF-8.
    """
    with file_errors(path):
        open_file: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as text:
            yield text


def find_delimiter(text: IO[str]) -> str:
    """Returns the one of `,`, `;` and tab that the first line has most often; rewinds the file."""
    delimiter = max(",;\t", key=text.readline().count)
    text.seek(0)
    return delimiter


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turns errors of a damaged file inside the block into a `CorpusError`."""
    try:
        yield
    except (EOFError, zlib.error, UnicodeDecodeError, OSError, pa.ArrowInvalid) as error:
        raise CorpusError(
            f"{path} is damaged or not UTF-8: {' '.join(str(error).split())[:300]}",
            fix="save a file of your own as UTF-8; download a published one again",
        ) from error


@contextmanager
def value_errors(source: str) -> Iterator[None]:
    """Turns errors of values of the wrong type inside the block into a `CorpusError`.

    Args:
        source: Path, line or record that is read, for the error text.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise CorpusError(
            f"{source}: {type(error).__name__}: {error}"[:300],
            fix="use the published file; the values of this one have other types",
        ) from error


def read_tsv(path: Path, columns: Sequence[str], has_header: bool) -> Iterator[pa.Table]:
    """Reads a tab-separated file as tables of strings. Quotation marks are plain characters.

    Args:
        path: The file; may end in `.gz`.
        columns: Names of all columns, in order.
        has_header: Whether the first line consists of exactly these names.

    Raises:
        CorpusError: Another header, a line with another number of columns, or a damaged file.
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
                f"{path}: columns {reader.schema.names}; expected {list(columns)}",
                fix="use the published file, tab-separated, with its header",
            )
        for batch in reader:
            yield pa.Table.from_batches([batch])


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Reads a file with one JSON value per line.

    Yields:
        The line number, from 1, and the value. Blank lines are skipped and counted.

    Raises:
        CorpusError: A line that is not JSON, or a damaged file.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise _json_error(path, number, error) from error
            except (ValueError, RecursionError) as error:  # thousands of digits or of brackets
                raise CorpusError(f"{path}, line {number:,}: {error}") from error


def read_json_records(path: Path, block_size: int = 1 << 20) -> Iterator[Any]:
    """Reads the values of a JSON list, or of a file with one JSON value per line, one at a time.

    Args:
        path: The file; may end in `.gz`. Its values are no numbers, which a block could cut.
        block_size: Characters that are read at once.

    Raises:
        CorpusError: The file is not JSON or is truncated.
    """
    decoder, num_values = json.JSONDecoder(), 0
    with open_text(path) as file:
        while (first_char := file.read(1)).isspace():
            pass
        text = "" if first_char == "[" else first_char
        while True:
            block = file.read(block_size)
            text = (text + block).lstrip(" \t\r\n,")
            while text and not text.startswith("]"):
                try:
                    value, end = decoder.raw_decode(text)
                except json.JSONDecodeError as error:
                    if block:
                        break  # the value continues in the next block
                    raise _json_error(path, num_values + 1, error) from error
                except (ValueError, RecursionError) as error:  # thousands of digits or of brackets
                    raise CorpusError(f"{path}, value {num_values + 1:,}: {error}") from error
                yield value
                num_values += 1
                text = text[end:].lstrip(" \t\r\n,")
            if not block:
                break
    if first_char == "[" and not text.startswith("]"):
        problem = f"{path}: the JSON list does not end after {num_values:,} values"
        raise CorpusError(problem, fix="download the file again; it is truncated")


def read_json_file(path: Path) -> Any:
    """Reads a file that consists of one JSON value.

    Raises:
        CorpusError: The file is not JSON or is truncated.
    """
    with open_text(path) as text:
        try:
            return json.load(text)
        except json.JSONDecodeError as error:
            raise _json_error(path, error.lineno, error) from error


def _json_error(path: Path, line: int, error: json.JSONDecodeError) -> CorpusError:
    problem = f"{path}, line {line:,} is not JSON: {error.msg} at character {error.pos:,}"
    fix = "correct it, or download the file again if it is truncated"
    return CorpusError(problem, fix)


def require_keys(
    record: Any, keys: Iterable[str], source: str, fix: str = "use the published file"
) -> tuple[Any, ...]:
    """Returns the values of `keys` in a JSON object.

    Args:
        record: The object.
        keys: Keys that it must have.
        source: Path, line or record that is read, for the error text.
        fix: How a user corrects it, for the error text.

    Raises:
        CorpusError: `record` is not an object, or keys are missing.
    """
    missing = [k for k in keys if not isinstance(record, dict) or k not in record]
    if missing:
        content = sorted(record) if isinstance(record, dict) else type(record).__name__
        problem = f"{source}: {content}, without {missing}; expected an object with {list(keys)}"
        raise CorpusError(problem, fix)
    return tuple(record[k] for k in keys)


def read_hub(
    name: str,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    batch_size: int = 65_536,
) -> Iterator[pa.Table]:
    """Reads a split of a dataset from the Hugging Face hub as Arrow tables.

    `datasets` downloads with a progress bar, resumes, and maps its copy on disk into memory, so the
    dataset may be larger than the memory. Without a network it reads `AS2RAY_HUB/OWNER/NAME`, a
    copy of the repository, if there is one, which has no revisions.

    Args:
        name: Owner and name of the repository.
        split: Name of the split there.
        config: Name of the configuration there.
        revision: A commit, branch or ref; by default the newest commit.
        batch_size: Maximum number of rows of a table.

    Raises:
        CorpusError: The dataset cannot be read.
    """
    from datasets import load_dataset

    copy = Path(os.environ.get(HUB_COPIES, "")) / name
    is_copied = HUB_COPIES in os.environ and copy.is_dir()
    try:
        path, revision = (str(copy), None) if is_copied else (name, revision)
        with nullcontext() if is_copied else offline_without_connection():
            dataset = load_dataset(path, config, split=split, revision=revision)
    except Exception as error:  # many types, of files, networks and formats
        at_revision = f"{name}@{revision}" if revision else name
        fix = f"connect to the network, or put a copy of the repository into {HUB_COPIES}/{name}"
        if "scripts are no longer supported" in str(error):
            fix = "read the hub's conversion: corpus_options.hub_revision=refs/convert/parquet"
        raise CorpusError(
            f"the dataset {at_revision} cannot be read from the hub: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}",
            fix=fix,
        ) from error
    yield from iter_arrow(dataset, batch_size)


def iter_arrow(dataset: Any, batch_size: int = 65_536) -> Iterator[pa.Table]:
    """Yields the rows of a `datasets.Dataset` as Arrow tables of at most `batch_size` rows."""
    yield from dataset.with_format("arrow").iter(batch_size=batch_size)
