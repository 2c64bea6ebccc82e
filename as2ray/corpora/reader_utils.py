"""Shapes that several readers share: ids from positions, rows gathered by question, labels.

Knows Arrow tables. Must not know any corpus or file.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError
from as2ray.tables.schema import question_offsets, split_by_question


def set_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The table with a column added, or replaced where it has one of that name."""
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)


def assign_candidate_ids(table: pa.Table) -> pa.Table:
    """The table with `candidate_id` = `<question_id>-<k>`, k from 0 inside each question.

    Questions must be whole and their rows adjacent.
    """
    starts = question_offsets(table["question_id"])
    sizes = np.diff(np.append(starts, table.num_rows))
    k = pa.array(np.arange(table.num_rows) - np.repeat(starts, sizes)).cast(pa.string())
    ids = table["question_id"].combine_chunks()
    return set_column(table, "candidate_id", pc.binary_join_element_wise(ids, k, "-"))


def assign_question_ids(stream: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Gives question ids (`q000000`, ...) and candidate ids to tables that have none.

    Equal question texts in adjacent rows are one question, also across two tables.

    Raises:
        CorpusError: A question text that comes again after another one.
    """
    first = 0
    seen: set[str] = set()
    texts = (set_column(t, "question_id", t["question"]) for t in stream)
    for table in split_by_question(texts):
        starts = question_offsets(table["question_id"])
        _check_unseen(table["question"].take(pa.array(starts)).to_pylist(), seen)
        sizes = np.diff(np.append(starts, table.num_rows))
        position = pa.array(np.repeat(first + np.arange(len(starts)), sizes)).cast(pa.string())
        ids = pc.binary_join_element_wise("q", pc.utf8_lpad(position, 6, "0"), "")
        yield assign_candidate_ids(set_column(table, "question_id", ids))
        first += len(starts)


def _check_unseen(questions: list[str], seen: set[str]) -> None:
    for text in questions:
        if text in seen:
            raise CorpusError(
                f"rows of the question {text!r} stand apart"
                "; expected all rows of a question one after the other",
                fix="group the source by question (for ASNQ: scattered=True)",
            )
        seen.add(text)


def group_adjacent(table: pa.Table) -> pa.Table:
    """The rows with equal question texts adjacent, in order of first appearance."""
    codes = table["question"].combine_chunks().dictionary_encode().indices.to_numpy()
    return table.take(pa.array(np.argsort(codes, kind="stable")))


def group_on_disk(stream: Iterable[pa.Table], num_buckets: int = 64) -> Iterator[pa.Table]:
    """As `gathered`, for a stream that does not fit in memory: spreads it over files on disk.

    The questions come out bucket by bucket, each bucket in order of first appearance. Takes as
    much room in the temporary folder as the stream has, and memory for one bucket.
    """
    with TemporaryDirectory(prefix="as2ray-regroup-") as folder:
        paths = _write_buckets(stream, Path(folder), num_buckets)
        for path in paths:
            with pa.memory_map(str(path)) as file:
                yield group_adjacent(pa.ipc.open_stream(file).read_all())


def _write_buckets(stream: Iterable[pa.Table], folder: Path, num_buckets: int) -> list[Path]:
    paths = [folder / f"{b:03d}.arrows" for b in range(num_buckets)]
    writers: list[pa.ipc.RecordBatchStreamWriter] = []
    for table in stream:
        writers = writers or [pa.ipc.new_stream(str(p), table.schema) for p in paths]
        texts = table["question"].dictionary_encode().unify_dictionaries().combine_chunks()
        bucket = np.array(
            [crc32(t.encode()) % num_buckets for t in texts.dictionary.to_pylist()], np.int64
        )
        rows = bucket[texts.indices.to_numpy()] if len(texts) else np.zeros(0, np.int64)
        for b in np.unique(rows):
            writers[b].write_table(table.take(pa.array(np.flatnonzero(rows == b))))
    for writer in writers:
        writer.close()
    return paths if writers else []


def parse_labels(
    table: pa.Table, column: str, label_values: Mapping[str, int], source: str
) -> pa.ChunkedArray:
    """A column of label words as int8 values.

    Raises:
        CorpusError: A word that is none of `meaning`.
    """
    words = table[column].cast(pa.string())
    codes = pc.index_in(words, value_set=pa.array(list(label_values), pa.string()))
    if codes.null_count:
        row = pc.index(pc.is_null(codes), True).as_py()
        raise CorpusError(
            (
                f"{source}: {column} {words[row].as_py()!r} in {table.slice(row, 1).to_pylist()[0]}"[
                    :500
                ]
            )
            + f"; expected one of {list(label_values)}",
            fix="correct the row, or give the publisher's own file",
        )
    return pa.array(list(label_values.values()), pa.int8()).take(codes)
