"""Scores the pairs of a table in chunks, in this process or by actors of Ray Data.

A chunk is one Parquet file of rows that follow one another. It is complete or does not exist, so a
run that was interrupted and is started again scores only the missing chunks. Chunks and their
content follow from the table and the ranker alone, not from the number of actors or threads.
"""

import json
import math
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from as2ray.cascade.cost import EncoderShape
from as2ray.distributed.node_files import NodeFiles
from as2ray.distributed.workers_config import WorkersConfig, bundle_resources
from as2ray.errors import As2rayError, CheckpointError, TrainingError
from as2ray.tables.atomic import atomic_file
from as2ray.tables.filters import QuestionFilter, filter_mask, filter_table
from as2ray.tables.parquet import ROW_GROUP_SIZE, ParquetTable, write_part
from as2ray.tables.schema import (
    CANDIDATE_SCHEMA,
    LOGIT_COLUMNS,
    group_by_passage,
    question_indices,
    question_offsets,
)
from as2ray.text.packing import TokenSequences
from as2ray.text.tokenization import TOKENIZER_SETTINGS, PairTokenizer

ScoreKind = Literal["score", "logits", "exits", "heads", "passages"]
"""What is stored of a ranker:

    score     keys that sort a question's candidates; a cascade drops candidates in between
    logits    logits of every pair, for students (columns `LOGIT_COLUMNS`)
    exits     scores of every exit without dropping, by its number of layers, and `tokens`
    heads     scores of each of CERBERUS's heads (`head 0`, `head 1`, ...)
    passages  one row per passage: its score and, as lists, the scores of its sentences; of a joint
              model that extracts answers also the best span of each sentence and its score
"""

CHUNKS_PER_TABLE = 64
"""About as many chunks a table has if they are neither too small nor too large."""

CHUNK_SIZES = (256, 65_536)
"""Minimum and maximum number of pairs of a chunk; whole questions may exceed it."""

RANKER_FACTS = b"ranker"
"""Metadata of a chunk of the kind `exits`: what the costs of the ranker follow from."""


@dataclass(frozen=True)
class ScoringSummary:
    """Size and duration of a scoring run."""

    num_pairs: int
    """Pairs of the table that count."""
    num_scored: int
    """Pairs that this run scored."""
    duration_s: float
    num_bytes: int
    """Size of all chunks."""
    busy_share: float = 0.0
    """Seconds that the ranker computed, divided by seconds of all actors, their start included."""
    ranker: dict[str, Any] = field(default_factory=dict)
    """For the kind `exits`: `shape`, the fields of the `EncoderShape` (None for an ensemble), and
    `sequential`, whether each exit is a ranker that starts from the embeddings."""


def score_table(
    table: str | Path,
    ranker: str | Path,
    folder: str | Path,
    workers: WorkersConfig,
    kind: ScoreKind = "logits",
    node_files: NodeFiles = NodeFiles(),  # noqa: B008
    *,
    question_filter: QuestionFilter = "raw",
    drop_ratio: float | None = None,
) -> ScoringSummary:
    """Writes a ranker's scores of the rows of a table.

    Args:
        table: Folder of a prepared table.
        ranker: Checkpoint folder; every ranker uses its own tokenizer.
        folder: Folder of the chunks; chunks that exist are kept.
        workers: Resources of the actors; with 0 workers this process scores.
        kind: What is stored.
        node_files: How nodes see files of others; chunks are published one by one.
        question_filter: Questions whose rows are scored.
        drop_ratio: For `score`: drop ratio after every exit, instead of the ranker's own.

    Raises:
        TrainingError: A score is not finite.
        CheckpointError: The ranker has no scores of this kind.
        ConfigError: A drop ratio for a ranker of one stage.
        ResourceError: The actors do not fit on the cluster.
    """
    started_at = time.perf_counter()
    files, ranker, folder = ParquetTable.open(table), Path(ranker).resolve(), Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    node_files.restore(folder)
    run = _ScoringRun(files, ranker, folder, kind, question_filter, drop_ratio, node_files)
    chunks = run.plan_chunks()
    missing = [chunk for chunk in chunks if not run.path(chunk["id"]).exists()]
    busy_s, num_actors = 0.0, 1
    if missing and workers.num_workers:
        busy_s, num_actors = _score_with_actors(run, missing, workers)
        node_files.restore(folder)
    elif missing:
        scorer = ChunkScorer(run)
        busy_s = sum(scorer.score(chunk["id"], *run.read(chunk)) for chunk in missing)
    duration_s = time.perf_counter() - started_at
    num_pairs, num_scored = (sum(c["num_pairs"] for c in group) for group in (chunks, missing))
    paths = [run.path(chunk["id"]) for chunk in chunks]
    num_bytes, busy_share = sum(p.stat().st_size for p in paths), busy_s / (num_actors * duration_s)
    metadata = pq.read_schema(paths[0]).metadata if paths else None
    facts = json.loads((metadata or {}).get(RANKER_FACTS, "{}"))
    return ScoringSummary(num_pairs, num_scored, duration_s, num_bytes, busy_share, facts)


def read_scores(folder: str | Path) -> pa.Table:
    """Reads the chunks that `score_table` wrote, in the order of the table's rows."""
    return ParquetTable.open(folder).to_table()


@dataclass(frozen=True)
class _ScoringRun:
    """What is scored; travels to every task, and loads no torch."""

    files: ParquetTable
    ranker: Path
    folder: Path
    kind: ScoreKind
    question_filter: QuestionFilter
    drop_ratio: float | None
    node_files: NodeFiles = field(default_factory=NodeFiles)

    def path(self, chunk_index: int) -> Path:
        return self.folder / f"part-{chunk_index:05d}.parquet"

    def plan_chunks(self) -> list[dict[str, int]]:
        """Returns id, first row, end row and number of pairs that count of every chunk."""
        kept_rows, starts = np.arange(len(self.files)), None
        # A corpus to distill on may be too large to read here, and its logits go by pairs.
        if self.kind != "logits" or self.question_filter != "raw":
            rows = self.files.take(kept_rows, ["question_id", "label"])
            kept_rows = np.flatnonzero(filter_mask(rows, self.question_filter))
            starts = question_offsets(rows["question_id"].take(pa.array(kept_rows)))
        num_pairs = len(kept_rows)
        chunk_size = int(np.clip(num_pairs // CHUNKS_PER_TABLE, *CHUNK_SIZES))
        if chunk_size > ROW_GROUP_SIZE:  # a chunk begins with a row group
            chunk_size -= chunk_size % ROW_GROUP_SIZE
        cuts = np.append(np.arange(0, num_pairs, chunk_size), num_pairs)
        if starts is not None:
            cuts = np.unique(np.append(starts, num_pairs)[np.searchsorted(starts, cuts)])
        begins, ends = cuts[:-1], cuts[1:]
        fields = [np.arange(len(begins)), kept_rows[begins], kept_rows[ends - 1] + 1, ends - begins]
        names = ["id", "begin", "end", "num_pairs"]
        return [dict(zip(names, map(int, values))) for values in zip(*fields)]

    def read(self, chunk: Mapping[str, int]) -> tuple[pa.Table, TokenSequences | None]:
        """Reads the rows of a chunk; tokenizes them if that needs no model."""
        self.node_files.fetch_paths([*self.files.paths[:1], self.ranker])
        all_columns = pq.read_schema(self.files.paths[0]).names
        columns = all_columns if self.kind == "passages" else CANDIDATE_SCHEMA.names
        rows = self.files.take(np.arange(chunk["begin"], chunk["end"]), columns)
        rows = filter_table(rows, self.question_filter)
        if self.tokenizer is None:
            return rows, None
        sequences = self.tokenizer.encode(*_texts(rows))
        return rows.drop_columns(["question", "candidate"]), sequences

    @cached_property
    def tokenizer(self) -> PairTokenizer | None:
        """The tokenizer of a ranker that `save` wrote; None if the ranker itself must tokenize.

        Ensembles, joint models and cascades that use BM25 score text. Checkpoints of other
        libraries do not say how long a pair may be, which only their encoder limits.
        """
        settings = json.loads((self.ranker / "config.json").read_text()).get("as2ray", {})
        stored = {name: settings[name] for name in TOKENIZER_SETTINGS if name in settings}
        reads_text = self.kind == "passages" or settings.get("ranker") == "two_in_one"
        if self.kind == "score" and self.drop_ratio is None:
            weights = settings.get("bm25_weights") or []
            reads_text |= settings.get("bm25_margin") is not None or any(weights)
        if reads_text or "max_length" not in stored:
            return None
        return PairTokenizer.from_folder(self.ranker, **stored)


def _score_with_actors(
    run: _ScoringRun, chunks: list[dict[str, int]], workers: WorkersConfig
) -> tuple[float, int]:
    """Scores chunks with actors; returns the seconds that rankers computed, and their number."""
    import ray.data

    from as2ray.distributed.cluster import (
        check_shared,
        hide_log_of_ray_data,
        unwrap_ray_errors,
        worker_environment,
    )
    from as2ray.distributed.plan import check_plan

    num_actors = min(workers.num_scoring_actors or workers.num_workers, len(chunks))
    min_actors = workers.min_workers and min(workers.min_workers, num_actors)
    num_cpus = workers.num_data_cpus * num_actors / workers.num_workers
    pool = replace(
        workers,
        num_workers=num_actors,
        min_workers=min_actors,
        num_data_cpus=num_cpus,
        data_label_selector={},
    )
    check_plan(pool, allow_gpu_sharing=True)
    check_shared([*run.files.paths, run.ranker], run.folder, run.node_files)
    # Nothing here waits for a CPU while the actors hold all of them: the blocks are made by this
    # process, and an actor reserves a worker's share of data's CPUs for the tasks that read.
    readers = ray.data.TaskPoolStrategy(size=math.ceil(num_cpus))
    actors = ray.data.ActorPoolStrategy(min_size=pool.required_workers, max_size=num_actors)
    rows = ray.data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(
        _read_chunk, batch_size=1, fn_kwargs={"run": run}, compute=readers, num_cpus=0
    )
    dataset = rows.map_batches(
        ChunkScorer,
        batch_size=1,
        compute=actors,
        fn_constructor_kwargs={"run": run, "num_threads": max(1, int(pool.cpus_per_worker))},
        num_cpus=bundle_resources(pool).get("CPU", 0),
        num_gpus=pool.gpus_per_worker,
        accelerator_type=pool.accelerator_type,
        label_selector=pool.label_selector or None,
        runtime_env={"env_vars": worker_environment()},
    )
    dataset.context.enable_progress_bars = False
    hide_log_of_ray_data()
    busy_s = 0.0
    with unwrap_ray_errors():
        for row in dataset.iter_rows():
            if row["error"]:
                raise pickle.loads(row["error"])
            busy_s += float(row["busy_s"])
    return busy_s, num_actors


# Ray Data loses the cause of an error in a function, but not in a generator.
def _read_chunk(batch: Mapping[str, np.ndarray], run: _ScoringRun) -> Iterator[dict[str, Any]]:
    # The tokenizer's own threads would use the cores of other tasks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    content = pickle.dumps(run.read({name: int(values[0]) for name, values in batch.items()}))
    yield {"id": batch["id"], "content": np.array([content], object)}


def _texts(rows: pa.Table) -> tuple[list[str], list[str]]:
    return rows["question"].to_pylist(), rows["candidate"].to_pylist()


class ChunkScorer:
    """Scores chunks and writes them.

    Args:
        run: What is scored.
        num_threads: Cores of this process; by default those that torch uses already.
    """

    def __init__(self, run: _ScoringRun, num_threads: int | None = None) -> None:
        import torch

        from as2ray.checkpoints.loading import load

        if num_threads:
            torch.set_num_threads(num_threads)
        run.node_files.fetch_paths([run.ranker])
        run.folder.mkdir(parents=True, exist_ok=True)
        self.run, self.ranker = run, load(run.ranker)
        self.ranker.is_reproducible = True

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        """Writes the chunk whose rows are pickled in `content`; yields the seconds of scoring.

        An error of as2ray is yielded, too: after one that is raised, Ray Data keeps the actors and
        their CPUs for minutes.
        """
        busy_s, error = 0.0, b""
        try:
            busy_s = self.score(int(batch["id"][0]), *pickle.loads(batch["content"][0]))
        except As2rayError as raised:
            error = pickle.dumps(raised)
        yield {"busy_s": np.array([busy_s]), "error": np.array([error], object)}

    def score(self, chunk_index: int, rows: pa.Table, sequences: TokenSequences | None) -> float:
        """Writes a chunk; returns the seconds of scoring.

        Args:
            chunk_index: Index of the chunk.
            rows: Its rows.
            sequences: Their tokens; None if the ranker itself must tokenize them.
        """
        from as2ray.models.sequential import SequentialRanker

        started_at = time.perf_counter()
        columns = self._predict(rows, sequences)
        busy_s = time.perf_counter() - started_at
        chunk = pa.table(columns).combine_chunks()
        self._check_finite(chunk, chunk_index)
        if self.run.kind == "exits":
            network = getattr(self.ranker, "network", None)
            shape = network and asdict(EncoderShape.from_config(network.config))
            facts = {"shape": shape, "sequential": isinstance(self.ranker, SequentialRanker)}
            chunk = chunk.replace_schema_metadata({RANKER_FACTS: json.dumps(facts)})
        with atomic_file(self.run.path(chunk_index)) as path:
            write_part(chunk, path)
        self.run.node_files.publish(self.run.path(chunk_index))
        return busy_s

    def _predict(self, rows: pa.Table, sequences: TokenSequences | None) -> dict[str, Any]:
        from as2ray.models.cascade import CascadeRanker
        from as2ray.models.packed_ranker import PackedRanker, as_packed_ranker

        ranker, kind, drop_ratio = self.ranker, self.run.kind, self.run.drop_ratio
        if kind == "passages":
            return self._predict_passages(group_by_passage(rows))
        if kind == "score":
            if sequences is None:
                staged = ranker.predict_table(rows, drop_ratio)
            else:
                packed, index = as_packed_ranker(ranker), question_indices(rows)
                staged = packed.predict_sequences(sequences, index, drop_ratio)
            ids = {name: rows[name] for name in ("question_id", "candidate_id")}
            return {**ids, "score": staged.sort_keys}
        tokens = sequences or ranker.tokenizer.encode(*_texts(rows))
        if kind == "exits":
            if isinstance(ranker, PackedRanker):
                scores = ranker.predict_sequence_exits(tokens)
            else:
                scores = ranker.predict_exits(*_texts(rows))
            layers = ranker.exit_layers or (len(ranker.encoder),)
            return {"tokens": tokens.lengths, **dict(zip(map(str, layers), scores.T))}
        if kind == "heads":
            if not isinstance(ranker, CascadeRanker):
                raise CheckpointError(f"{type(ranker).__name__} has no ranking heads")
            heads = ranker.predict_heads(tokens)
            return {f"head {number}": scores for number, scores in enumerate(heads.T)}
        packed_ranker = as_packed_ranker(ranker)
        logits = packed_ranker.predict_logits(packed_ranker.pack(tokens), rows.num_rows)
        return {"candidate_id": rows["candidate_id"], **dict(zip(LOGIT_COLUMNS, logits.T))}

    def _predict_passages(self, passages: pa.Table) -> dict[str, Any]:
        from as2ray.models.two_in_one import TwoInOneRanker

        ranker = self.ranker
        if not isinstance(ranker, TwoInOneRanker):
            raise CheckpointError(f"{type(ranker).__name__} scores no passages")
        sentences = passages["candidate"].combine_chunks()
        questions, texts = passages["question"].to_pylist(), sentences.to_pylist()
        spans: dict[int, Any] | None = None if ranker.network.answer is None else {}
        scores, sentence_scores = ranker.predict_passages(questions, texts, spans)
        by_passage = partial(pa.ListArray.from_arrays, sentences.offsets)
        columns = {name: passages[name] for name in ("question_id", "passage_id")}
        columns |= {"score": scores, "sentence_scores": by_passage(sentence_scores)}
        if spans is not None:
            # Spans have the order of the sentences; one that has no tokens has no span.
            answer_of = dict(zip(sorted(spans), ranker.read_spans(texts, spans)))
            answers = [answer_of.get(number) for number in range(len(sentence_scores))]
            answer_scores = pa.array([a and a.score for a in answers], pa.float32())
            columns["answers"] = by_passage(pa.array([a and a.text for a in answers]))
            columns["answer_scores"] = by_passage(answer_scores)
        return columns

    def _check_finite(self, chunk: pa.Table, chunk_index: int) -> None:
        for name, column in zip(chunk.column_names, chunk.columns):
            values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
            is_float = pa.types.is_floating(values.type)
            if is_float and (num_wrong := pc.sum(pc.invert(pc.is_finite(values))).as_py()):
                raise TrainingError(
                    f"{num_wrong:,} of {len(values):,} values of {name!r} in chunk {chunk_index} "
                    f"of {self.run.kind} are not finite",
                    fix="score in fp32, or train the ranker again with a lower learning rate",
                )
