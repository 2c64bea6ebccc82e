"""The shapes that pass between all rooms: the candidates table and the ranked answer.

A joint model of passages reads a candidates table by passages: `by_passage`.

Knows Arrow tables. Must not know any corpus, model or file.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError

CANDIDATES = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("candidate_id", pa.string()),
        ("candidate", pa.string()),
        ("label", pa.int8()),
    ]
)
"""The columns every candidates table has; rows of one question are adjacent."""

OPTIONAL = pa.schema(
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

PASSAGES = pa.schema(
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

MAX_CHARACTERS = 100_000
"""Longest question or candidate accepted; longer text is a page, not a sentence."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One candidate of a ranking, best first."""

    index: int
    """Position in the list of candidates that was given."""
    score: float
    """Probability that the candidate answers the question."""
    text: str
    """The candidate."""
    exit_layer: int | None = None
    """Layer after which the score was taken; None of a ranker without exits."""


def falling(scores: Iterable[float]) -> list[float]:
    """Scores of a ranking, best first, each below the one before it, in float32 too.

    A candidate that fell early can have a higher score than a survivor, and others have equal
    ones. Whoever sorts by these, from whatever order, gets the ranking all the same.
    """
    found: list[float] = []
    for score in scores:
        if found:
            score = min(score, float(np.nextafter(np.float32(found[-1]), np.float32(-np.inf))))
        found.append(score)
    return found


@dataclass(frozen=True, slots=True)
class RankedPassage:
    """One passage of a ranking, best first, with the sentences selected in it."""

    index: int
    """Position in the list of passages that was given."""
    score: float
    """Higher is more relevant; around -1 to 1."""
    sentences: tuple[Ranked, ...]
    """The selected ones, best first; their indices count inside the passage."""


@dataclass(frozen=True, slots=True)
class ShortAnswer:
    """A short answer, cut out of a sentence."""

    text: str
    """Its characters."""
    score: float
    """Sum of the logits of its first and last token: the higher, the surer."""
    passage: int
    """Position of its passage in the list that was given."""
    sentence: int
    """Position of its sentence in that passage."""


@dataclass(frozen=True)
class Counts:
    """Size of a split: distinct questions, question-candidate pairs, positive pairs."""

    questions: int
    pairs: int
    positives: int

    def __str__(self) -> str:
        return f"{self.questions:,} questions / {self.pairs:,} pairs / {self.positives:,} positives"


def count(table: pa.Table) -> Counts:
    """Counts of a candidates table."""
    positives = pc.sum(pc.equal(table["label"], 1)).as_py() or 0
    return Counts(pc.count_distinct(table["question_id"]).as_py(), table.num_rows, positives)


def question_starts(question_id: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Row at which each run of equal question ids starts, shape [runs], int64, ascending."""
    if len(question_id) == 0:
        return np.zeros(0, np.int64)
    ids = question_id.combine_chunks() if isinstance(question_id, pa.ChunkedArray) else question_id
    changed = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.flatnonzero(changed) + 1])


def by_passage(table: pa.Table) -> pa.Table:
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
    starts = question_starts(
        pc.binary_join_element_wise(table["question_id"], table["passage_id"], "\n")
    )
    ends = pa.array(np.append(starts, table.num_rows), pa.int32())
    first = table.take(pa.array(starts))
    columns = [
        pa.ListArray.from_arrays(ends, table[field.name].combine_chunks()).cast(field.type)
        if pa.types.is_list(field.type)
        else first[field.name].combine_chunks().cast(field.type)
        for field in PASSAGES
    ]
    return pa.table(columns, schema=PASSAGES)


def question_numbers(table: pa.Table) -> np.ndarray:
    """Number of each row's question in the order of appearance, shape [rows]."""
    encoded = table["question_id"].combine_chunks().dictionary_encode()
    numbers: np.ndarray = encoded.indices.to_numpy()
    return numbers


def validate(table: pa.Table, source: str) -> pa.Table:
    """The table cast to the schema, or an error that names the first offending row.

    Args:
        table: Any table with at least the columns of `CANDIDATES`.
        source: What the table was read from, for the error.

    Raises:
        CorpusError: Columns missing, unknown or of another type; a label other than 0 and 1; an
            empty question or candidate; a text over `MAX_CHARACTERS`; rows of one question not
            adjacent; a candidate id twice.
    """
    table = _cast(table, source)
    for name in CANDIDATES.names:
        nulls = table[name].null_count
        if nulls:
            row = pc.index(pc.is_null(table[name]), True).as_py()
            _refuse(table, source, row, f"{nulls:,} empty values in column {name!r}", "no null")
    for name in ("question", "candidate"):
        blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(table[name])), 0)
        _refuse_first(table, source, blank, f"an empty {name}", f"text in every {name}")
        long = pc.greater(pc.utf8_length(table[name]), MAX_CHARACTERS)
        _refuse_first(table, source, long, f"an over-long {name}", f"<= {MAX_CHARACTERS:,} chars")
    wrong = pc.invert(pc.is_in(table["label"], value_set=pa.array([0, 1], pa.int8())))
    _refuse_first(table, source, wrong, "an unknown label", "label 0 or 1")
    starts = question_starts(table["question_id"])
    if len(starts) != pc.count_distinct(table["question_id"]).as_py():
        firsts = table["question_id"].take(pa.array(starts)).to_pylist()
        seen: set[str] = set()
        again = next(i for i, q in enumerate(firsts) if q in seen or seen.add(q))  # type: ignore[func-returns-value]
        _refuse(table, source, int(starts[again]), "a question that starts twice", "adjacent rows")
    if pc.count_distinct(table["candidate_id"]).as_py() != table.num_rows:
        distinct = pc.count_distinct(table["candidate_id"]).as_py()
        raise CorpusError(
            f"{source}: {table.num_rows:,} rows but {distinct:,} distinct candidate ids",
            expected="a candidate id of its own for every row",
            mend="number the candidates inside each question",
        )
    return table


def _cast(table: pa.Table, source: str) -> pa.Table:
    missing = [n for n in CANDIDATES.names if n not in table.column_names]
    known = {f.name: f for f in [*CANDIDATES, *OPTIONAL]}
    unknown = [n for n in table.column_names if n not in known]
    if missing or unknown:
        raise CorpusError(
            f"{source}: columns {table.column_names} (missing {missing}, unknown {unknown})",
            expected=f"{CANDIDATES.names}, and optionally {OPTIONAL.names}",
            mend="rename the columns, or drop the unknown ones",
        )
    schema = pa.schema([known[n] for n in known if n in table.column_names])
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CorpusError(
            f"{source}: {error}", expected=str(schema), mend="cast the columns to these types"
        ) from error


def _refuse_first(
    table: pa.Table, source: str, bad: pa.ChunkedArray, came: str, expected: str
) -> None:
    row = pc.index(bad, True).as_py()
    if row >= 0:
        _refuse(table, source, row, f"{came} (and {pc.sum(bad).as_py() - 1:,} more)", expected)


def _refuse(table: pa.Table, source: str, row: int, came: str, expected: str) -> None:
    shown = {k: str(v)[:80] for k, v in table.slice(row, 1).to_pylist()[0].items()}
    raise CorpusError(
        f"{source}: row {row:,} has {came}: {shown}",
        expected=expected,
        mend="correct or remove the row in the source",
    )


class Fingerprint:
    """SHA-256 over the content of a table that comes in pieces, whatever the pieces are.

    Lengths and characters of every column are hashed apart, so neither the chunking nor the
    file layout of a table changes its fingerprint; its rows, their order and the names of its
    columns do.
    """

    def __init__(self) -> None:
        self._columns: dict[str, tuple[hashlib._Hash, hashlib._Hash]] = {}

    def update(self, table: pa.Table | pa.RecordBatch) -> "Fingerprint":
        """Adds the rows of `table`."""
        for name in table.column_names:
            lengths, content = self._columns.setdefault(name, (hashlib.sha256(), hashlib.sha256()))
            column = table[name]
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            for chunk in chunks:
                values = chunk if pa.types.is_string(chunk.type) else chunk.cast(pa.string())
                size = pc.binary_length(values).fill_null(-1)
                lengths.update(size.to_numpy(zero_copy_only=False).astype(np.int32).tobytes())
                content.update(_characters(values))
        return self

    def hexdigest(self) -> str:
        """16 hexadecimal digits."""
        whole = hashlib.sha256()
        for name in sorted(self._columns):
            whole.update(name.encode())
            for part in self._columns[name]:
                whole.update(part.digest())
        return whole.hexdigest()[:16]


def _characters(values: pa.StringArray) -> memoryview:
    dense = pc.drop_null(values)
    _, offsets, data = dense.buffers()
    if data is None or len(dense) == 0:
        return memoryview(b"")
    bounds = np.frombuffer(offsets, np.int32)[dense.offset : dense.offset + len(dense) + 1]
    return memoryview(data)[bounds[0] : bounds[-1]]


def fingerprint(table: pa.Table) -> str:
    """Fingerprint of a whole table, 16 hexadecimal digits."""
    return Fingerprint().update(table).hexdigest()


def by_question(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Re-cuts a stream of tables so that no question stands in two pieces.

    Args:
        tables: Pieces of one candidates table in order, cut anywhere.

    Yields:
        Pieces that end where a question ends; none is empty.
    """
    held: pa.Table | None = None
    for table in tables:
        held = table if held is None else pa.concat_tables([held, table])
        starts = question_starts(held["question_id"])
        if len(starts) > 1:
            yield held.slice(0, starts[-1])
            held = held.slice(starts[-1])
    if held is not None and held.num_rows:
        yield held
