"""What several readers share: columns, ids from positions, rows grouped by question, labels."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import (
    CANDIDATE_SCHEMA,
    OPTIONAL_COLUMNS,
    question_indices,
    question_offsets,
    split_by_question,
)

log = logging.getLogger(__name__)

NO_CANDIDATES: Final = "(The run has no candidates.)"
"""The only candidate of a judged query for which the run has none, so that it counts as 0."""

Parsers = Mapping[int, Callable[[str], Any]]
"""Function that parses a column, by the position of the column."""


def require_list(values: Any, name: str) -> Any:
    """Returns the values; a `TypeError` if they are one text, of which each character is a text."""
    if isinstance(values, str):
        raise TypeError(f"{name} are one text, not a list: {values!r:.100}")
    return values


def candidate_schema(*optional_columns: str) -> pa.Schema:
    """Returns the schema of a candidates table with some of `OPTIONAL_COLUMNS`."""
    return pa.schema([*CANDIDATE_SCHEMA, *map(OPTIONAL_COLUMNS.field, optional_columns)])


def set_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Adds a column, or replaces the one of that name."""
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)


def select_columns(
    table: pa.Table, columns: Mapping[str, str], label_values: Mapping[str, int], source: str
) -> pa.Table:
    """Returns some columns of a release under other names, with labels as numbers.

    Args:
        table: Rows of the release.
        columns: For each column of the result, one of which is `label`, the column of the release.
        label_values: Value of each label.
        source: What the table was read from, for error texts.
    """
    labels = parse_labels(table, columns["label"], label_values, source)
    selected = table.select(list(columns.values())).rename_columns(list(columns))
    return set_column(selected, "label", labels)


def assign_candidate_ids(table: pa.Table) -> pa.Table:
    """Sets `candidate_id` to `<question_id>-<k>`, where k counts from 0 within each question.

    Args:
        table: Whole questions, rows of a question adjacent.
    """
    starts = question_offsets(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    k = pa.array(np.arange(table.num_rows) - np.repeat(starts, sizes)).cast(pa.string())
    ids = table["question_id"].combine_chunks()
    return set_column(table, "candidate_id", pc.binary_join_element_wise(ids, k, "-"))


def assign_question_ids(stream: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    """Sets question ids (`q000000`, ...) and candidate ids of tables that have none.

    Adjacent rows with the same question text are one question, even across two tables.

    Raises:
        CorpusError: The rows of a question text are not adjacent.
    """
    num_questions = 0
    tables = (set_column(table, "question_id", table["question"]) for table in stream)
    for table in whole_questions(tables, source):
        numbers = num_questions + question_indices(table)
        padded = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 6, "0")
        ids = pc.binary_join_element_wise("q", padded, "")
        yield assign_candidate_ids(set_column(table, "question_id", ids))
        num_questions = int(numbers[-1]) + 1


def whole_questions(tables: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    """Cuts a stream of tables so that each table holds whole questions.

    Raises:
        CorpusError: The rows of a question are not adjacent.
    """
    seen: set[str] = set()
    for table in split_by_question(tables):
        starts = pa.array(question_offsets(table["question_id"]))
        for question in table["question_id"].take(starts).to_pylist():
            if question in seen:
                problem = f"{source}: the rows of the question {question!r} are not adjacent"
                fix = "group the rows of the source by question (for ASNQ: ungrouped=True)"
                raise CorpusError(problem, fix)
            seen.add(question)
        yield table


def group_adjacent(table: pa.Table) -> pa.Table:
    """Makes rows of the same question text adjacent, in order of first appearance."""
    question_index = table["question"].combine_chunks().dictionary_encode().indices.to_numpy()
    return table.take(pa.array(np.argsort(question_index, kind="stable")))


def group_on_disk(stream: Iterable[pa.Table], num_buckets: int = 64) -> Iterator[pa.Table]:
    """Same as `group_adjacent` for a stream that does not fit into memory.

    The stream is written to `num_buckets` temporary files by a hash of the question. The result has
    one table per file, with its questions in order of first appearance. The temporary folder needs
    as much space as the stream, the memory must hold one file.
    """
    with TemporaryDirectory(prefix="as2ray-regroup-") as folder:
        for path in _write_buckets(stream, Path(folder), num_buckets):
            with pa.memory_map(str(path)) as file:
                yield group_adjacent(pa.ipc.open_stream(file).read_all())


def _write_buckets(stream: Iterable[pa.Table], folder: Path, num_buckets: int) -> list[Path]:
    paths = [folder / f"{b:03d}.arrows" for b in range(num_buckets)]
    writers: list[pa.ipc.RecordBatchStreamWriter] = []
    for table in stream:
        writers = writers or [pa.ipc.new_stream(str(p), table.schema) for p in paths]
        questions = table["question"].combine_chunks().dictionary_encode()
        hashes = [crc32(text.encode()) for text in questions.dictionary.to_pylist()]
        buckets = np.array(hashes, np.int64)[questions.indices.to_numpy()] % num_buckets
        for b in np.unique(buckets):
            writers[b].write_table(table.take(pa.array(np.flatnonzero(buckets == b))))
    for writer in writers:
        writer.close()
    return paths if writers else []


def parse_labels(
    table: pa.Table, column: str, label_values: Mapping[str, int], source: str
) -> pa.ChunkedArray:
    """Returns a column of label words as int8 values.

    Args:
        table: The table.
        column: Its column of words.
        label_values: Value of each word.
        source: What the table was read from, for error texts.

    Raises:
        CorpusError: A word that is not in `label_values`.
    """
    words = table[column].cast(pa.string())
    value_index = pc.index_in(words, value_set=pa.array(list(label_values), pa.string()))
    if value_index.null_count:
        row = pc.index(pc.is_null(value_index), True).as_py()
        content = str(table.slice(row, 1).to_pylist()[0])[:400]
        problem = f"{column} {words[row].as_py()!r} in {content} is not one of {list(label_values)}"
        raise CorpusError(f"{source}: {problem}", fix="correct the row")
    return pa.array(list(label_values.values()), pa.int8()).take(value_index)


def read_columns(path: Path, parsers: Parsers, num_columns: int | None) -> Iterator[list[Any]]:
    """Reads columns of a file whose lines have columns between blanks.

    Args:
        path: The file.
        parsers: The columns to read.
        num_columns: Number of columns of every line; None for any number.

    Raises:
        CorpusError: A line has another number of columns, or a column cannot be parsed.
    """
    with raw_files.open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            columns = line.split()
            try:
                if len(columns) != (num_columns or len(columns)):
                    raise ValueError(f"{len(columns)} columns instead of {num_columns}")
                yield [parse(columns[position]) for position, parse in parsers.items()]
            except (ValueError, IndexError) as error:
                problem = f"{path}, line {number:,} is not as published: {line[:80]!r} ({error})"
                raise CorpusError(problem, fix="use the published file") from error


def warn_of_missed_queries(num_queries: int, run_path: Path) -> None:
    """Logs how many queries have `NO_CANDIDATES`, if there are any."""
    if num_queries:
        log.warning("%d judged queries have no line in %s, and count as 0", num_queries, run_path)


def assign_split_by_hash(key: str, split_ends: Mapping[str, float]) -> str:
    """Returns the split of a key by a hash of it.

    Args:
        key: Equal keys are in the same split.
        split_ends: Upper end of each split's share of the hash values, ascending to 1.
    """
    share = int.from_bytes(sha256(key.encode()).digest()[:4]) / 2**32
    return next(split for split, end in split_ends.items() if share < end)
