"""The shapes that pass between all rooms: the candidates table and the ranked answer.

A joint model of passages reads a candidates table by passages: `by_passage`.

Knows Arrow tables. Must not know any corpus, model or file.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError

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
"""The columns every candidates table has; rows of one question are adjacent."""

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
"""The columns a table has where its source gives them: a graded relevance, the document; the
passage, its title, the sentence's number in it, and whether the passage is relevant; the answer of
the question, as short as it was annotated; the half-open range of the document's tokens at which
the candidate stands."""

PASSAGE_SCHEMA = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("passage_id", pa.string()),
        ("title", pa.string()),
        ("passage_label", pa.int8()),
        ("answer", pa.string()),
        ("candidate", pa.list_(pa.string())),
        ("label", pa.list_(pa.int8())),
        ("sentence_index", pa.list_(pa.int16())),
    ]
)
"""The columns of a candidates table by passages, the last three a sentence's each."""

LOGIT_COLUMNS = ("not_answer", "answer")
"""Columns of a teacher's stored logits, beside `candidate_id`."""

TEACHER_LOGITS = "teacher_logits"
"""Data of each packed sequence: its teachers' logits, one pair after the other."""

LIST_INDEX = "list"
"""Data of each packed sequence: a number that the candidates of its list share."""

MAX_TEXT_CHARS = 100_000
"""Longest question or candidate accepted; longer text is a page, not a sentence."""


@dataclass(frozen=True)
class TableCounts:
    """Size of a split: distinct questions, question-candidate pairs, positive pairs."""

    num_questions: int
    num_pairs: int
    num_positives: int

    def __str__(self) -> str:
        return f"{self.num_questions:,} questions / {self.num_pairs:,} pairs / {self.num_positives:,} positives"


def count_table(table: pa.Table) -> TableCounts:
    """Counts of a candidates table."""
    positives = pc.sum(pc.equal(table["label"], 1)).as_py() or 0
    return TableCounts(pc.count_distinct(table["question_id"]).as_py(), table.num_rows, positives)


def question_offsets(question_ids: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Row at which each run of equal question ids starts, shape [runs], int64, ascending."""
    if len(question_ids) == 0:
        return np.zeros(0, np.int64)
    ids = (
        question_ids.combine_chunks() if isinstance(question_ids, pa.ChunkedArray) else question_ids
    )
    changed = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.flatnonzero(changed) + 1])


def group_by_passage(table: pa.Table) -> pa.Table:
    """A candidates table with a row for each passage, in order; the columns of `PASSAGES`.

    Args:
        table: Candidates, rows of one passage adjacent; where it has no passages, every candidate
            is one of its own, as relevant as it is.
    """
    rows = pa.array(np.arange(table.num_rows))
    if "passage_id" not in table.column_names:
        table = table.append_column("passage_id", table["candidate_id"])
        table = table.append_column("passage_label", table["label"])
    blank = {
        "title": pa.nulls(table.num_rows, pa.string()).fill_null(""),
        "answer": pa.nulls(table.num_rows, pa.string()).fill_null(""),
        "sentence_index": pc.multiply(rows, 0),
    }
    for name in blank.keys() - set(table.column_names):
        table = table.append_column(name, blank[name])
    starts = question_offsets(
        pc.binary_join_element_wise(table["question_id"], table["passage_id"], "\n")
    )
    ends = pa.array(np.append(starts, table.num_rows), pa.int32())
    first = table.take(pa.array(starts))
    columns = [
        pa.ListArray.from_arrays(ends, table[field.name].combine_chunks()).cast(field.type)
        if pa.types.is_list(field.type)
        else first[field.name].combine_chunks().cast(field.type)
        for field in PASSAGE_SCHEMA
    ]
    return pa.table(columns, schema=PASSAGE_SCHEMA)


def question_indices(table: pa.Table) -> np.ndarray:
    """Number of each row's question in the order of appearance, shape [rows]."""
    encoded = table["question_id"].combine_chunks().dictionary_encode()
    numbers: np.ndarray = encoded.indices.to_numpy()
    return numbers


def validate_table(table: pa.Table, source: str) -> pa.Table:
    """The table cast to the schema, or an error that names the first offending row.

    Args:
        table: Any table with at least the columns of `CANDIDATES`.
        source: What the table was read from, for the error.

    Raises:
        CorpusError: Columns missing, unknown or of another type; a label other than 0 and 1; an
            empty question or candidate; a text over `MAX_CHARACTERS`; rows of one question not
            adjacent; a candidate id twice.
    """
    table = _cast_to_schema(table, source)
    for name in CANDIDATE_SCHEMA.names:
        nulls = table[name].null_count
        if nulls:
            row = pc.index(pc.is_null(table[name]), True).as_py()
            _raise_row_error(
                table, source, row, f"{nulls:,} empty values in column {name!r}", "no null"
            )
    for name in ("question", "candidate"):
        blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(table[name])), 0)
        _check_rows(table, source, blank, f"an empty {name}", f"text in every {name}")
        long = pc.greater(pc.utf8_length(table[name]), MAX_TEXT_CHARS)
        _check_rows(table, source, long, f"an over-long {name}", f"<= {MAX_TEXT_CHARS:,} chars")
    wrong = pc.invert(pc.is_in(table["label"], value_set=pa.array([0, 1], pa.int8())))
    _check_rows(table, source, wrong, "an unknown label", "label 0 or 1")
    starts = question_offsets(table["question_id"])
    if len(starts) != pc.count_distinct(table["question_id"]).as_py():
        firsts = table["question_id"].take(pa.array(starts)).to_pylist()
        seen: set[str] = set()
        again = next(i for i, q in enumerate(firsts) if q in seen or seen.add(q))  # type: ignore[func-returns-value]
        _raise_row_error(
            table, source, int(starts[again]), "a question that starts twice", "adjacent rows"
        )
    if pc.count_distinct(table["candidate_id"]).as_py() != table.num_rows:
        distinct = pc.count_distinct(table["candidate_id"]).as_py()
        raise CorpusError(
            f"{source}: {table.num_rows:,} rows but {distinct:,} distinct candidate ids"
            "; expected a candidate id of its own for every row",
            fix="number the candidates inside each question",
        )
    return table


def _cast_to_schema(table: pa.Table, source: str) -> pa.Table:
    missing = [n for n in CANDIDATE_SCHEMA.names if n not in table.column_names]
    known = {f.name: f for f in [*CANDIDATE_SCHEMA, *OPTIONAL_COLUMNS]}
    unknown = [n for n in table.column_names if n not in known]
    if missing or unknown:
        raise CorpusError(
            f"{source}: columns {table.column_names} (missing {missing}, unknown {unknown})"
            f"; expected {CANDIDATE_SCHEMA.names}, and optionally {OPTIONAL_COLUMNS.names}",
            fix="rename the columns, or drop the unknown ones",
        )
    schema = pa.schema([known[n] for n in known if n in table.column_names])
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CorpusError(
            f"{source}: {error}; expected {str(schema)}",
            fix="cast the columns to these types",
        ) from error


def _check_rows(
    table: pa.Table, source: str, is_bad: pa.ChunkedArray, problem: str, expected: str
) -> None:
    row = pc.index(is_bad, True).as_py()
    if row >= 0:
        _raise_row_error(
            table, source, row, f"{problem} (and {pc.sum(is_bad).as_py() - 1:,} more)", expected
        )


def _raise_row_error(table: pa.Table, source: str, row: int, problem: str, expected: str) -> None:
    shown = {k: str(v)[:80] for k, v in table.slice(row, 1).to_pylist()[0].items()}
    raise CorpusError(
        f"{source}: row {row:,} has {problem}: {shown}; expected {expected}",
        fix="correct or remove the row in the source",
    )


def split_by_question(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Re-cuts a stream of tables so that no question stands in two pieces.

    Args:
        tables: Pieces of one candidates table in order, cut anywhere.

    Yields:
        Pieces that end where a question ends; none is empty.
    """
    held: pa.Table | None = None
    for table in tables:
        held = table if held is None else pa.concat_tables([held, table])
        starts = question_offsets(held["question_id"])
        if len(starts) > 1:
            yield held.slice(0, starts[-1])
            held = held.slice(starts[-1])
    if held is not None and held.num_rows:
        yield held


def from_rows(rows: Iterable[Sequence[object]], schema: pa.Schema) -> pa.Table:
    """A table of that schema from rows whose values stand in the order of its columns."""
    columns = list(zip(*rows)) or [[]] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema)]
    return pa.table(arrays, schema=schema)


def chunked_tables(
    groups: Iterable[Iterable[Sequence[object]]], schema: pa.Schema, groups_per_table: int
) -> Iterator[pa.Table]:
    """Tables of at most `groups_per_table` groups of rows, such as the candidates of a question."""
    for chunk in batched(groups, groups_per_table):
        yield from_rows(chain.from_iterable(chunk), schema)


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` values in order; the last may be shorter. As itertools.batched of 3.12."""
    iterator = iter(values)
    while chunk := list(islice(iterator, size)):
        yield chunk
