"""Schema of the candidates table: validation, counts, and grouping by question or passage."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import ConfigError, CorpusError

T = TypeVar("T")

CANDIDATE_SCHEMA = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("candidate_id", pa.string()),
        ("candidate", pa.string()),
        ("label", pa.int8()),
    ]
)
"""Columns of every candidates table; rows of one question are adjacent."""

OPTIONAL_COLUMNS = pa.schema(
    [
        ("grade", pa.int8()),
        ("document_id", pa.string()),
        ("passage_id", pa.string()),
        ("title", pa.string()),
        ("sentence_index", pa.int16()),
        ("passage_label", pa.int8()),
        ("answer", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
    ]
)
"""Columns that depend on the source.

`grade` is a graded relevance. `title`, `sentence_index` and `passage_label` belong to the passage
of the candidate; `sentence_index` is the position of the candidate in it. `answer` is the annotated
short answer. `start` and `end` are the half-open range of the candidate's tokens in its document.
"""

ALL_COLUMNS = pa.unify_schemas([CANDIDATE_SCHEMA, OPTIONAL_COLUMNS])
"""Columns that a candidates table may have."""

_PASSAGE_COLUMNS = ("question_id", "question", "passage_id", "title", "passage_label", "answer")
_SENTENCE_COLUMNS = ("candidate", "label", "sentence_index")

PASSAGE_SCHEMA = pa.schema(
    [ALL_COLUMNS.field(name) for name in _PASSAGE_COLUMNS]
    + [(name, pa.list_(ALL_COLUMNS.field(name).type)) for name in _SENTENCE_COLUMNS]
)
"""Columns of a table with one row per passage; the last three have one value per sentence."""

LOGIT_COLUMNS = ("not_answer", "answer")
"""Columns of a teacher's stored logits, in addition to `candidate_id`."""

TEACHER_LOGITS = "teacher_logits"
"""Sequence data with the logits of all teachers, two values per teacher."""

LIST_INDEX = "list"
"""Sequence data with a number that is the same for all candidates of a list."""

MAX_TEXT_CHARS = 100_000
"""Maximum number of characters of a question or candidate; a sentence is never longer."""


@dataclass(frozen=True)
class TableCounts:
    """Numbers of distinct questions, question-candidate pairs and positive pairs of a table."""

    num_questions: int
    num_pairs: int
    num_positives: int

    def __str__(self) -> str:
        return (
            f"{self.num_questions:,} questions / {self.num_pairs:,} pairs / "
            f"{self.num_positives:,} positives"
        )


def count_table(table: pa.Table) -> TableCounts:
    """Counts the questions, pairs and positives of a candidates table."""
    positives = pc.sum(pc.equal(table["label"], 1)).as_py() or 0
    return TableCounts(pc.count_distinct(table["question_id"]).as_py(), table.num_rows, positives)


def question_offsets(question_ids: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Returns the first row of each run of equal question ids, shape [runs], int64, ascending."""
    if len(question_ids) == 0:
        return np.zeros(0, np.int64)
    changed = np.asarray(pc.not_equal(question_ids[1:], question_ids[:-1]))
    return np.concatenate([[0], np.flatnonzero(changed) + 1])


def group_by_passage(table: pa.Table) -> pa.Table:
    """Returns a table with one row per passage, in order, with the columns of `PASSAGE_SCHEMA`.

    Args:
        table: A candidates table; rows of one passage are adjacent. Without a column `passage_id`
            every candidate becomes a passage with the candidate's label.
    """
    if "passage_id" not in table.column_names:
        table = table.append_column("passage_id", table["candidate_id"])
        table = table.append_column("passage_label", table["label"])
    defaults = {"title": "", "answer": "", "sentence_index": 0}
    for name in defaults.keys() - set(table.column_names):
        table = table.append_column(name, pa.repeat(defaults[name], table.num_rows))
    passage_keys = pc.binary_join_element_wise(table["question_id"], table["passage_id"], "\n")
    starts = question_offsets(passage_keys)
    offsets = pa.array(np.append(starts, table.num_rows))
    first_rows = table.take(pa.array(starts))
    columns = {name: first_rows[name].combine_chunks() for name in _PASSAGE_COLUMNS}
    for name in _SENTENCE_COLUMNS:
        columns[name] = pa.ListArray.from_arrays(offsets, table[name].combine_chunks())
    return pa.table(columns, schema=PASSAGE_SCHEMA)


def question_indices(table: pa.Table) -> np.ndarray:
    """Returns the number of each row's question, in order of appearance, shape [rows]."""
    ids = table["question_id"].combine_chunks()
    return np.asarray(ids.dictionary_encode().indices)


def check_is_table(table: object, columns: Iterable[str] = CANDIDATE_SCHEMA.names) -> None:
    """Checks that a user passed a candidates table in.

    Args:
        table: What was passed in.
        columns: Columns that are needed.

    Raises:
        ConfigError: It is another object, such as a path or a data frame, or lacks columns.
    """
    problem = ""
    if not isinstance(table, pa.Table):
        problem = f"candidates must be an Arrow table, not {type(table).__name__}"
    elif missing := [name for name in columns if name not in table.column_names]:
        problem = f"a table with the columns {table.column_names} lacks {missing}"
    if problem:
        raise ConfigError(problem, fix="read them with as2ray.load_table, also data frames")


def validate_table(table: pa.Table, source: str) -> pa.Table:
    """Checks a candidates table and returns it cast to the schema.

    Args:
        table: Any table with at least the columns of `CANDIDATE_SCHEMA`.
        source: What the table was read from, for the error text.

    Raises:
        CorpusError: Missing or unknown columns, or columns of another type; a null; a label other
            than 0 and 1; an empty question or candidate; a text over `MAX_TEXT_CHARS`; rows of one
            question that are not adjacent; a duplicate candidate id. Names the first such row.
    """
    table = _cast_to_schema(table, source)
    for name in CANDIDATE_SCHEMA.names:
        _check_rows(table, source, pc.is_null(table[name]), f"no value in column {name!r}")
    for name in ("question", "candidate"):
        is_empty = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(table[name])), 0)
        _check_rows(table, source, is_empty, f"an empty {name}")
        is_long = pc.greater(pc.utf8_length(table[name]), MAX_TEXT_CHARS)
        _check_rows(table, source, is_long, f"an over-long {name} (limit {MAX_TEXT_CHARS:,})")
    is_unknown = pc.invert(pc.is_in(table["label"], value_set=pa.array([0, 1], pa.int8())))
    _check_rows(table, source, is_unknown, "an unknown label, neither 0 nor 1")
    restarts = np.flatnonzero(np.diff(question_indices(table)) < 0) + 1
    if len(restarts):
        problem = "a question that starts twice; its rows must be adjacent"
        raise _row_error(table, source, int(restarts[0]), problem)
    check_candidate_ids(table, source)
    return table


def check_candidate_ids(table: pa.Table, source: str) -> None:
    """Raises a `CorpusError` if two rows have the same candidate id."""
    num_ids = pc.count_distinct(table["candidate_id"]).as_py()
    if num_ids != table.num_rows:
        problem = f"{source}: {table.num_rows:,} rows but {num_ids:,} distinct candidate ids"
        raise CorpusError(problem, fix="number the candidates inside each question")


def _cast_to_schema(table: pa.Table, source: str) -> pa.Table:
    missing = [name for name in CANDIDATE_SCHEMA.names if name not in table.column_names]
    unknown = [name for name in table.column_names if name not in ALL_COLUMNS.names]
    if missing or unknown:
        raise CorpusError(
            f"{source}: columns {table.column_names} (missing {missing}, unknown {unknown}); a "
            f"table has {CANDIDATE_SCHEMA.names}, and optionally {OPTIONAL_COLUMNS.names}"
        )
    schema = pa.schema([field for field in ALL_COLUMNS if field.name in table.column_names])
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        fix = f"cast the columns to these types:\n{schema}"
        raise CorpusError(f"{source}: {error}", fix=fix) from error


def _check_rows(table: pa.Table, source: str, is_bad: pa.ChunkedArray, problem: str) -> None:
    row = pc.index(is_bad, True).as_py()
    if row >= 0:
        num_others = pc.sum(is_bad).as_py() - 1
        raise _row_error(table, source, row, f"{problem} (and {num_others:,} more)")


def _row_error(table: pa.Table, source: str, row: int, problem: str) -> CorpusError:
    values = {name: str(value)[:80] for name, value in table.slice(row, 1).to_pylist()[0].items()}
    text = f"{source}: row {row:,} has {problem}: {values}"
    return CorpusError(text, fix="correct or remove the row in the source")


def split_by_question(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Cuts a stream of tables so that no question is divided between two tables.

    Args:
        tables: Chunks of one candidates table in order, cut anywhere.

    Yields:
        Chunks that end where a question ends; none is empty.
    """
    rest: pa.Table | None = None
    for table in tables:
        rest = table if rest is None else pa.concat_tables([rest, table])
        starts = question_offsets(rest["question_id"])
        if len(starts) > 1:
            yield rest.slice(0, starts[-1])
            rest = rest.slice(starts[-1])
    if rest is not None and rest.num_rows:
        yield rest


def from_rows(rows: Iterable[Sequence[object]], schema: pa.Schema) -> pa.Table:
    """Makes a table from rows whose values are in the order of the schema's columns."""
    return pa.table(list(zip(*rows)) or [()] * len(schema), schema=schema)


def chunked_tables(
    groups: Iterable[Iterable[Sequence[object]]], schema: pa.Schema, groups_per_table: int
) -> Iterator[pa.Table]:
    """Makes tables of at most `groups_per_table` groups of rows.

    Args:
        groups: Groups of rows, such as the candidates of each question.
        schema: Columns of the tables, in the order of a row's values.
        groups_per_table: Maximum number of groups of a table.
    """
    for chunk in batched(groups, groups_per_table):
        yield from_rows(chain.from_iterable(chunk), schema)


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields lists of `size` values; the last may be shorter. Same as Python 3.12's `batched`."""
    iterator = iter(values)
    while chunk := list(islice(iterator, size)):
        yield chunk
