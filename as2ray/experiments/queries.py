"""Stored questions, and the labels of candidates that are retrieved for them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from as2ray.experiments.stage import Stage, StageContext
from as2ray.experiments.tables import TABLE, read_table
from as2ray.retrieval.pseudo_labels import Query
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import CANDIDATE_SCHEMA, from_rows, question_offsets

T = TypeVar("T")

NOTHING_FOUND = "(BM25 found nothing.)"
"""Candidate of a question for which nothing is retrieved, so that its measures are 0."""

QUERIES_PER_TASK = 500
"""Questions that a task labels, or retrieves candidates for."""

QUESTION_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("question", pa.string()), ("source_sentence", pa.int64())]
)
"""Columns of stored questions without candidates: the fields of `Query`."""


def write_queries(queries: Iterable[Query], folder: Path) -> dict[str, Any]:
    """Writes questions into the folder of a stage; returns entries of its outputs."""
    rows = from_rows(queries, QUESTION_SCHEMA)
    pq.write_table(rows, folder / TABLE, compression="zstd")
    return {"num_questions": rows.num_rows}


def read_queries(folder: Path) -> list[Query]:
    """Reads the questions of a table, or those that `write_queries` stored."""
    rows = read_table(folder)
    rows = rows.take(pa.array(question_offsets(rows["question_id"])))
    names = [name for name in QUESTION_SCHEMA.names if name in rows.column_names]
    return [Query(*values) for values in zip(*(rows[name].to_pylist() for name in names))]


def map_queries(
    context: StageContext,
    function: Callable[[Sequence[Query]], T],
    groups: Sequence[Sequence[Query]],
) -> Iterator[T]:
    """Calls a function with groups of questions, in tasks of Ray if there are workers."""
    if not context.workers.num_workers:
        return map(function, groups)
    from as2ray.distributed.index import iter_on_ray

    return iter_on_ray(function, groups)


def distinct_texts(context: StageContext, tables: Iterable[Stage]) -> list[str]:
    """Returns the distinct candidates of tables, on one line each."""
    paths = (path for table in tables for path in ParquetTable.open(context.path(table)).paths)
    # A batch at a time: most candidates are those of several questions.
    files = (pq.ParquetFile(path).iter_batches(columns=["candidate"]) for path in paths)
    texts = (" ".join(t.split()) for file in files for rows in file for t in rows[0].to_pylist())
    return list(dict.fromkeys(texts))


def positive_texts(rows: pa.Table) -> dict[str, list[str]]:
    """Returns the distinct texts of the positives of each question, on one line each."""
    positives: dict[str, dict[str, None]] = {}
    rows = rows.filter(pc.equal(rows["label"], 1))
    for id, text in zip(rows["question_id"].to_pylist(), rows["candidate"].to_pylist()):
        positives.setdefault(id, {})[" ".join(text.split())] = None
    return {id: list(texts) for id, texts in positives.items()}


def retrieved_rows(
    positives: Mapping[str, Sequence[str]],
    queries: Sequence[Query],
    results: Iterable[dict[str, float]],
    append_missed: bool = False,
) -> tuple[pa.Table, np.ndarray, dict[str, int]]:
    """Labels the texts that were retrieved for each question by its positives.

    A question without any gets `NOTHING_FOUND`, unless `append_missed` is for training.

    Returns the candidates, their scores, and counts of the questions without.
    """
    retrieved: list[tuple[str, str, str, str, int]] = []
    scores: list[float] = []
    counts = {"finds nothing": 0, "misses all positives": 0}
    for (id, question, *_), candidates in zip(queries, results):
        answers = dict.fromkeys(positives.get(id, ()))
        has_none = answers.keys().isdisjoint(candidates)
        counts["finds nothing"] += not candidates
        counts["misses all positives"] += bool(answers) and has_none
        if append_missed:
            candidates |= {text: 0.0 for text in answers if text not in candidates}
        elif not candidates:
            candidates = {NOTHING_FOUND: 0.0}
        scores += candidates.values()
        retrieved += [
            (id, question, f"{id}-{number}", text, int(text in answers))
            for number, text in enumerate(candidates)
        ]
    return from_rows(retrieved, CANDIDATE_SCHEMA), np.array(scores), counts
