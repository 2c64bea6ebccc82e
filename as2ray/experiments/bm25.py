"""Stages of BM25: tuned k1 and b, indexes, pseudo-labels, retrieved candidates, scores."""

import hashlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from as2ray.corpora.registry import get_corpus
from as2ray.errors import ConfigError, CorpusError
from as2ray.evaluation.measures import evaluate
from as2ray.experiments.rankers import StoredScores
from as2ray.experiments.stage import NOT_IDENTITY, Outputs, Stage, StageContext
from as2ray.experiments.store import Store
from as2ray.experiments.tables import TABLE, read_table, write_table, write_tables
from as2ray.retrieval.documents import DocumentColumns, list_parts
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.pseudo_labels import (
    PseudoLabelConfig,
    PseudoLabelResult,
    Query,
    label_queries,
    merge_pseudo_labels,
)
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables import raw_files
from as2ray.tables.atomic import atomic_file
from as2ray.tables.filters import QuestionFilter, filter_mask
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import CANDIDATE_SCHEMA, batched, count_table, from_rows, question_offsets
from as2ray.text.bm25 import BM25, TermConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

INDEX = "index"
"""Folder of the index in a stage that makes one."""

QUERIES_PER_TASK = 500
"""Questions that a task labels, or retrieves candidates for."""

BM25_SCORES = "bm25_scores.npy"
"""File of a stage with retrieved candidates: BM25's score of each row."""

QUESTION_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("question", pa.string()), ("source_sentence", pa.int64())]
)
"""Columns of stored questions without candidates: the fields of `Query`."""

RUN_SCHEMA = pa.schema(
    [("question_id", pa.string()), ("sentence", pa.int64()), ("score", pa.float32())]
)
"""Columns of a run: a sentence is its index in the index that was searched."""


@dataclass(frozen=True, eq=False)
class BM25Grid(Stage):
    """The point of a grid of k1 and b that ranks the dev table best; a single point is given."""

    dev: Stage
    points: tuple[tuple[float, float], ...]
    """Pairs of k1 and b."""
    measure: str = "RR"
    """The measure that chooses; Mokrii et al. take RR."""
    collection: tuple[Stage, ...] = ()
    """Tables whose candidates are retrieved from, as the index will; by default each question's own
    candidates are ranked."""
    depth: int = 100
    """Number of candidates to retrieve from the collection."""
    terms: TermConfig = field(default_factory=TermConfig)
    """What counts as a term."""

    def run(self, context: StageContext) -> Outputs:
        """Ranks with each point; of equal points the first one wins."""
        if len(self.points) == 1:
            return self._outputs(*self.points[0])
        rows, queries = read_table(context.path(self.dev)), read_queries(context.path(self.dev))
        is_search = bool(self.collection)
        texts = _distinct_texts(context, self.collection)
        candidates = texts if is_search else rows["candidate"].to_pylist()
        term_counts = self._bm25().count_terms(candidates)
        grid = []
        for k1, b in self.points:
            if is_search:
                index = self._bm25(k1, b).build_from_counts(term_counts)
                hits = (index.search(query.text, self.depth) for query in queries)
                results = ({texts[hit.index]: hit.score for hit in found} for found in hits)
                positives = _positive_texts(rows)
                ranked, scores, _ = _retrieved_rows(positives, queries, results, False)
            else:
                ranked, scores = rows, self._bm25(k1, b).score_candidates(rows, term_counts)
            kept: QuestionFilter = "raw" if is_search else "no_all_negative"
            result = evaluate(ranked, scores, [self.measure], question_filter=kept)
            grid.append((k1, b, result.measures[self.measure]))
        k1, b, quality = max(grid, key=lambda point: point[2])
        log.info("BM25: dev %s %.4f with k1 %g, b %g", self.measure, quality, k1, b)
        return {**self._outputs(k1, b), self.measure: quality, "grid": grid}

    def chosen(self, context: StageContext) -> BM25:
        """Returns BM25 with the chosen k1 and b."""
        outputs = context.outputs(self)
        return self._bm25(outputs["k1"], outputs["b"])

    def _outputs(self, k1: float, b: float) -> dict[str, Any]:
        changed = [name for name, is_set in asdict(self.terms).items() if is_set]
        return {"k1": k1, "b": b, "content": ", ".join([f"k1={k1:g}", f"b={b:g}", *changed])}

    def _bm25(self, k1: float = BM25.k1, b: float = BM25.b) -> BM25:
        return BM25(k1, b, **asdict(self.terms))


@dataclass(frozen=True, eq=False)
class CandidateIndex(Stage):
    """An index of the distinct candidates of tables; each text is a sentence."""

    tables: tuple[Stage, ...]
    bm25: BM25Grid

    def run(self, context: StageContext) -> Outputs:
        """Collects the texts, and indexes them in one shard."""
        texts = _distinct_texts(context, self.tables)
        context.scratch.mkdir(parents=True, exist_ok=True)
        source = context.scratch / "texts.parquet"
        pq.write_table(pa.table({"text": texts}), source)
        config = IndexConfig(self.bm25.chosen(context), sentence_splitter="lines")
        return write_stage_index(context, source, config)


@dataclass(frozen=True, eq=False)
class CollectionTexts(Stage):
    """The texts of a whole collection of a corpus, each on one line, as a Parquet file."""

    corpus: str
    name: str
    """One of the corpus' `collections`."""
    data_dir: str = field(metadata=NOT_IDENTITY)
    """Absolute folder of the release."""
    check_size: bool = True
    """Whether the number of texts must be the published one, as far as that is not rounded."""

    def run(self, context: StageContext) -> Outputs:
        """Writes the texts as they are read; a row group is the unit of the index's shards."""
        num_texts, schema = 0, pa.schema([("candidate", pa.large_string())])
        corpus = get_corpus(self.corpus)
        with pq.ParquetWriter(context.output / TABLE, schema, compression="zstd") as writer:
            for texts in corpus.read_collection(self.name, self.data_dir):
                writer.write_table(pa.table({"candidate": texts}, schema=schema))
                num_texts += len(texts)
        if not num_texts:
            problem = f"{self.corpus}/{self.name} in {self.data_dir} has no texts"
            raise CorpusError(problem, fix="use the published file")
        is_verified = self.check_size and corpus.check_collection_size(self.name, num_texts)
        return {"num_texts": num_texts, "verified": is_verified}

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        corpus = get_corpus(self.corpus)
        file = raw_files.find_file(Path(self.data_dir), corpus.collections[self.name])
        state = "" if file else f"missing ({' or '.join(corpus.collections[self.name])}): "
        source = f"{state}{self.corpus} ({corpus.license}): {self.data_dir}"
        return {"data": f"{self.corpus}/{self.name}", "source": source}


@dataclass(frozen=True, eq=False)
class CollectionIndex(CandidateIndex):
    """An index of one `CollectionTexts`, whose texts need not fit into memory.

    A text that the collection has twice is found twice, and is then one candidate.
    """

    RESOURCES = "pool"

    def run(self, context: StageContext) -> Outputs:
        """Indexes the texts, with one task of Ray per shard if there are workers."""
        columns = DocumentColumns(text="candidate")
        config = IndexConfig(self.bm25.chosen(context), "lines", columns)
        num_shards = max(1, context.workers.num_workers)
        return write_stage_index(context, context.path(self.tables[0]) / TABLE, config, num_shards)


def _distinct_texts(context: StageContext, tables: Iterable[Stage]) -> list[str]:
    """Returns the distinct candidates of tables, on one line each."""
    paths = (path for table in tables for path in ParquetTable.open(context.path(table)).paths)
    # A batch at a time: most candidates are those of several questions.
    files = (pq.ParquetFile(path).iter_batches(columns=["candidate"]) for path in paths)
    texts = (" ".join(t.split()) for file in files for rows in file for t in rows[0].to_pylist())
    return list(dict.fromkeys(texts))


@dataclass(frozen=True, eq=False)
class DocumentIndex(Stage):
    """An index of the sentences of a user's documents."""

    VERSION = 3
    RESOURCES = "pool"

    source: str = field(metadata=NOT_IDENTITY)
    """Absolute path of a folder of documents, or of a table of them."""
    content_hash: str
    config: IndexConfig
    num_shards: int | None = field(default=None, metadata=NOT_IDENTITY)
    """Maximum number of shards, by default as many as workers; they change no result."""

    @classmethod
    def from_documents(
        cls, source: str | Path, config: IndexConfig, num_shards: int | None = None
    ) -> "DocumentIndex":
        """Returns the stage for the documents as they are now.

        Raises:
            CorpusError: There is nothing to read.
        """
        source = Path(source).resolve()
        return cls(str(source), hash_documents(source), config, num_shards)

    def identity(self, fingerprints: Mapping[Stage, str]) -> dict[str, Any]:
        """Adds the version of the sentence splitter."""
        return {**super().identity(fingerprints), "config": self.config.to_dict()}

    def run(self, context: StageContext) -> Outputs:
        """Indexes the documents, with one task of Ray per shard if there are workers."""
        num_shards = self.num_shards or max(1, context.workers.num_workers)
        return write_stage_index(context, Path(self.source), self.config, num_shards)

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        return {"data": self.source, "source": f"documents {self.source}"}


def hash_documents(source: Path) -> str:
    """Returns a hash of the names and contents of all files below a path.

    Raises:
        CorpusError: There is nothing to read.
    """
    digest = hashlib.sha256()
    for path in sorted({part.path for part in list_parts(source)}):
        # Names may be invalid Unicode, and files unreadable: the index reports them.
        digest.update(os.fsencode(path.removeprefix(str(source))) + b"\0")
        with suppress(OSError), open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def write_stage_index(
    context: StageContext, source: Path, config: IndexConfig, num_shards: int = 0
) -> Outputs:
    """Writes an index into the folder of a stage; 0 shards are one that this process writes."""
    new = context.scratch / INDEX
    options: dict[str, Any] = {"overwrite": True}
    if config.encoder is not None:
        from as2ray.checkpoints.sentence_encoder import load_sentence_encoder

        options["load_encoder"] = load_sentence_encoder
    # Shards are files of one folder, which all nodes must see.
    if num_shards and context.workers.num_workers and context.store.is_local:
        from as2ray.distributed.index import build_sharded

        options["workers"] = context.workers
        manifest = build_sharded(source, new, config, num_shards=num_shards, **options)
    else:
        num_shards = max(1, num_shards)
        manifest = write_index(source, new, config, num_shards=num_shards, **options)
    shutil.rmtree(context.output / INDEX, ignore_errors=True)
    new.rename(context.output / INDEX)
    outputs = {n: manifest[n] for n in ("documents", "sentences", "skipped", "fingerprint")}
    counts = outputs["sentences"], outputs["documents"], outputs["skipped"] or "nothing"
    log.info("index: %d sentences of %d documents, skipped %s", *counts)
    return outputs


@dataclass(frozen=True, eq=False)
class LabelledTable(Stage):
    """A candidates table of questions that BM25 labels."""

    RESOURCES = "pool"

    index: Stage
    queries: Stage
    """A table, or stored questions (`write_queries`)."""
    config: PseudoLabelConfig
    min_questions: int = 1
    """Minimum number of labelled questions; 2 if the table is split."""

    def run(self, context: StageContext) -> Outputs:
        """Labels the questions.

        Raises:
            CorpusError: No question has a positive and a negative.
            ConfigError: Fewer than `min_questions` have both.
        """
        queries = read_queries(context.path(self.queries))
        label = partial(_label_queries, context.store, context.path(self.index), self.config)
        groups = list(batched(queries, QUERIES_PER_TASK))
        labelled = merge_pseudo_labels(list(_map_queries(context, label, groups)))
        counts, left_out = count_table(labelled.table), dict(labelled.skipped)
        log.info("pseudo-labels: %s, left out %s", counts, left_out or "nothing")
        if (number := counts.num_questions) < self.min_questions:
            problem = f"{number} questions that BM25 can label of {len(queries)}"
            raise too_few_questions(f"{problem}, left out {left_out}")
        return {**write_table(labelled.table, context.output), "left_out": left_out}


def _label_queries(
    store: Store, index: Path, config: PseudoLabelConfig, queries: Sequence[Query]
) -> PseudoLabelResult:
    return label_queries(_open_index(store, index), queries, config)


def _open_index(store: Store, folder: Path) -> SentenceIndex:
    """Opens the index of a stage on any node."""
    store.fetch_paths([folder])
    return SentenceIndex.open(folder / INDEX)


def _map_queries(
    context: StageContext,
    function: Callable[[Sequence[Query]], T],
    groups: Sequence[Sequence[Query]],
) -> Iterator[T]:
    """Calls a function with groups of questions, in tasks of Ray if there are workers."""
    if not context.workers.num_workers:
        return map(function, groups)
    from as2ray.distributed.index import iter_on_ray

    return iter_on_ray(function, groups)


def too_few_questions(problem: str) -> ConfigError:
    """Returns the error of a table that cannot be split."""
    return ConfigError(
        f"{problem}; at least two are needed, one to train on and one to select the checkpoint",
        fix="give a file of questions, or more documents",
    )


@dataclass(frozen=True, eq=False)
class SplitTable(Stage):
    """One part of the questions of a table that has at least two; neither part is empty."""

    table: Stage
    part: Literal["train", "dev"]
    share: int
    """About one of this number of questions goes to dev. It is chosen by a hash of the text, so it
    does not depend on the other questions."""

    def run(self, context: StageContext) -> Outputs:
        """Writes the rows of the part's questions."""
        ids: dict[str, list[str]] = {"train": [], "dev": []}
        for query in read_queries(context.path(self.table)):
            number = int.from_bytes(hashlib.sha256(query.text.encode()).digest()[:4])
            ids["dev" if number % self.share == 0 else "train"].append(query.id)
        for part, other in (("train", "dev"), ("dev", "train")):
            if not ids[part]:
                ids[part].append(ids[other].pop())
        rows = read_table(context.path(self.table))
        is_kept = pc.is_in(rows["question_id"], value_set=pa.array(ids[self.part]))
        return write_table(rows.filter(is_kept), context.output)


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
        hits_of_parts = _map_queries(context, search, [parts[path] for path in missing])
        for path, hits in zip(missing, hits_of_parts):
            with atomic_file(path) as temporary:
                pq.write_table(hits, temporary, compression="zstd")
            context.store.publish(path)
        return {"num_parts": len(parts), "num_searched_parts": len(missing)}


def _search(store: Store, index: Path, depth: int, queries: Sequence[Query]) -> pa.Table:
    """Returns the rows of a run: BM25's first sentences for each question, best first."""
    sentences = _open_index(store, index)
    rows = (
        (query.id, hit.index, hit.score)
        for query in queries
        for hit in sentences.search(query.text, depth)
    )
    return from_rows(rows, RUN_SCHEMA)


@dataclass(frozen=True, eq=False)
class RetrievedTable(Stage):
    """The candidates of a run of BM25, instead of each question's own."""

    bm25_run: BM25Run
    """The questions and what BM25 found. Their positives are recognized by their text."""
    append_missed: bool
    """Whether positives that BM25 missed are appended, as for training."""

    def run(self, context: StageContext) -> Outputs:
        """Joins the texts, a part of the run at a time, and stores BM25's scores.

        The scores of missed positives are 0. The outputs count the questions for which BM25 finds
        nothing, which the table cannot contain, and those for which it misses all positives, which
        `no_all_negative` removes.
        """
        run, counts, scores = self.bm25_run, Counter[str](), []
        rows, folder = read_table(context.path(run.table)), context.path(run)
        positives, queries = _positive_texts(rows), read_queries(context.path(run.table))
        sentences = _open_index(context.store, context.path(run.index))

        def read_parts() -> Iterator[pa.Table]:
            for number, group in enumerate(batched(queries, QUERIES_PER_TASK)):
                hits = pq.read_table(folder / f"part-{number:05d}.parquet")
                results = _join_texts(sentences, hits, group)
                table, part_scores, part_counts = _retrieved_rows(
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


def _positive_texts(rows: pa.Table) -> dict[str, list[str]]:
    """Returns the distinct texts of the positives of each question, on one line each."""
    positives: dict[str, dict[str, None]] = {}
    rows = rows.filter(pc.equal(rows["label"], 1))
    for id, text in zip(rows["question_id"].to_pylist(), rows["candidate"].to_pylist()):
        positives.setdefault(id, {})[" ".join(text.split())] = None
    return {id: list(texts) for id, texts in positives.items()}


def _retrieved_rows(
    positives: Mapping[str, Sequence[str]],
    queries: Sequence[Query],
    results: Iterable[dict[str, float]],
    append_missed: bool,
) -> tuple[pa.Table, np.ndarray, dict[str, int]]:
    """Labels the texts that were retrieved for each question by its positives.

    Returns the candidates, their scores, and counts of the questions without.
    """
    retrieved: list[tuple[str, str, str, str, int]] = []
    scores: list[float] = []
    counts = {"finds nothing": 0, "misses all positives": 0}
    for (id, question, *_), candidates in zip(queries, results):
        answers = dict.fromkeys(positives.get(id, ()), 0.0)
        has_none = answers.keys().isdisjoint(candidates)
        counts["finds nothing"] += not candidates
        counts["misses all positives"] += bool(answers) and has_none
        if append_missed:
            candidates |= {text: 0.0 for text in answers if text not in candidates}
        scores += candidates.values()
        retrieved += [
            (id, question, f"{id}-{number}", text, int(text in answers))
            for number, text in enumerate(candidates)
        ]
    return from_rows(retrieved, CANDIDATE_SCHEMA), np.array(scores), counts


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
