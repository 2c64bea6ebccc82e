"""Stages of retrieved candidates: runs of BM25, tables of what they find, and scores."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.indexes import CandidateIndex, open_index
from as2ray.experiments.queries import (
    QUERIES_PER_TASK,
    map_queries,
    positive_texts,
    read_queries,
    retrieved_rows,
)
from as2ray.experiments.rankers import StoredScores
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.experiments.store import Store
from as2ray.experiments.tables import TABLE, read_table, write_tables
from as2ray.retrieval.pseudo_labels import Query
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.atomic import atomic_file
from as2ray.tables.filters import QuestionFilter, filter_mask
from as2ray.tables.schema import batched, from_rows

log = logging.getLogger(__name__)

BM25_SCORES = "bm25_scores.npy"
"""File of a stage with retrieved candidates: BM25's score of each row."""

RUN_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("sentence", pa.int64()), ("score", pa.float32())]
)
"""Columns of a run: a sentence is its index in the index that was searched."""


@dataclass(frozen=True, eq=False)
class BM25Run(Stage):
    """BM25's first sentences of an index for each question of a table, without their texts.

    A part has the questions of one task. It is complete or does not exist, so that a run which was
    interrupted searches only for what is missing.
    """

    RESOURCES = "pool"

    table: Stage
    """The questions."""
    index: CandidateIndex
    depth: int
    """Number of sentences of a question."""

    def run(self, context: StageContext) -> Outputs:
        """Searches for the questions of the parts that an interrupted attempt has not written."""
        context.store.restore(context.output)
        search = partial(_search, context.store, context.path(self.index), self.depth)
        parts = {
            context.output / f"part-{number:05d}.parquet": queries
            for number, queries in enumerate(
                batched(read_queries(context.path(self.table)), QUERIES_PER_TASK)
            )
        }
        missing = [path for path in parts if not path.exists()]
        hits_of_parts = map_queries(context, search, [parts[path] for path in missing])
        for path, hits in zip(missing, hits_of_parts):
            with atomic_file(path) as temporary:
                pq.write_table(hits, temporary, compression="zstd")
            context.store.publish(path)
        return {"num_parts": len(parts), "num_searched_parts": len(missing)}


def _search(store: Store, index: Path, depth: int, queries: Sequence[Query]) -> pa.Table:
    """Returns the rows of a run: BM25's first sentences for each question, best first."""
    sentences = open_index(store, index)
    rows = (
        (query.id, hit.index, hit.score)
        for query in queries
        for hit in sentences.search(query.text, depth)
    )
    return from_rows(rows, RUN_SCHEMA)


@dataclass(frozen=True, eq=False)
class RetrievedTable(Stage):
    """The candidates of a run of BM25, instead of each question's own."""

    VERSION = 2

    bm25_run: BM25Run
    """The questions and what BM25 found. Their positives are recognized by their text."""
    append_missed: bool
    """Whether positives that BM25 missed are appended, as for training."""

    def run(self, context: StageContext) -> Outputs:
        """Joins the texts, a part of the run at a time, and stores BM25's scores.

        The scores of missed positives and of `NOTHING_FOUND` are 0. The outputs count the questions
        for which BM25 finds nothing, and those for which it misses all positives, which
        `no_all_negative` removes.
        """
        run, counts, scores = self.bm25_run, Counter[str](), []
        rows, folder = read_table(context.path(run.table)), context.path(run)
        positives, queries = positive_texts(rows), read_queries(context.path(run.table))
        sentences = open_index(context.store, context.path(run.index))

        def read_parts() -> Iterator[pa.Table]:
            for number, group in enumerate(batched(queries, QUERIES_PER_TASK)):
                hits = pq.read_table(folder / f"part-{number:05d}.parquet")
                results = _join_texts(sentences, hits, group)
                table, part_scores, part_counts = retrieved_rows(
                    positives, group, results, self.append_missed
                )
                scores.append(part_scores)
                counts.update(part_counts)
                yield table

        outputs = write_tables(read_parts(), context.output)
        log.info("of BM25's first %d, %s", run.depth, dict(counts))
        np.save(context.output / BM25_SCORES, np.concatenate(scores))
        return {**outputs, "bm25": dict(counts)}


def _join_texts(
    index: SentenceIndex, hits: pa.Table, queries: Sequence[Query]
) -> Iterator[dict[str, float]]:
    """Yields the texts of a run for each question, with their scores."""
    found: dict[str, dict[str, float]] = {query.id: {} for query in queries}
    texts = index.texts(hits["sentence"].to_pylist())
    for id, text, score in zip(hits["question_id"].to_pylist(), texts, hits["score"].to_pylist()):
        found[id][text] = score
    yield from found.values()


@dataclass(frozen=True, eq=False)
class BM25Scores(StoredScores):
    """BM25's scores of the rows of a table."""

    table: Stage
    bm25: BM25Grid | CandidateIndex
    """Chosen k1 and b, which score a table with its own document frequencies; or the index that
    retrieved the candidates, whose scores are stored with them."""
    question_filter: QuestionFilter = "raw"

    def run(self, context: StageContext) -> None:
        """Scores all rows, because document frequencies count over all, and keeps those it must."""
        folder = context.path(self.table)
        rows = read_table(folder)
        if isinstance(self.bm25, BM25Grid):
            scores = self.bm25.chosen(context).score_candidates(rows)
        else:
            scores = np.load(folder / BM25_SCORES)
        kept = scores[filter_mask(rows, self.question_filter)]
        pq.write_table(pa.table({"score": kept}), context.output / TABLE)
