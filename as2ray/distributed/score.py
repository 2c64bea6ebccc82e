"""Stores the logits of a ranker for every pair of a corpus, in chunks.

A chunk is one Parquet file, which is complete or does not exist. A run that was interrupted and is
started again scores only the missing chunks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.checkpoints.loading import load
from as2ray.distributed.cluster import check_shared
from as2ray.distributed.plan import check_plan
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import TrainingError
from as2ray.models.packed_ranker import as_packed_ranker
from as2ray.tables.atomic import atomic_file
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LOGIT_COLUMNS

CHUNK_SIZE = 65_536
"""Number of pairs of a chunk."""


@dataclass(frozen=True)
class ScoringSummary:
    """Size and duration of a scoring run."""

    num_pairs: int
    """Pairs of the corpus."""
    num_scored: int
    """Pairs that this run scored."""
    duration_s: float
    num_bytes: int
    """Size of all chunks."""


def store_logits(
    table: str | Path,
    ranker: str | Path,
    folder: str | Path,
    workers: WorkersConfig,
    chunk_size: int = CHUNK_SIZE,
) -> ScoringSummary:
    """Writes a ranker's logits of every pair of a corpus.

    Args:
        table: Folder of a prepared table.
        ranker: Checkpoint folder; every ranker uses its own tokenizer.
        folder: Folder of the chunks; chunks that exist are kept.
        workers: Resources of the actors; with 0 workers this process scores.
        chunk_size: Number of pairs of a chunk.

    Raises:
        TrainingError: A logit is not finite.
    """
    files, folder = ParquetTable.open(table), Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    scorer_kwargs: dict[str, Any] = {
        "files": files,
        "ranker": str(Path(ranker).resolve()),
        "folder": folder,
        "chunk_size": chunk_size,
    }
    num_chunks = -(-len(files) // chunk_size)
    missing_chunks = [n for n in range(num_chunks) if not _chunk_path(folder, n).exists()]
    started_at = time.perf_counter()
    if workers.num_workers == 0:
        scorer = LogitScorer(**scorer_kwargs)
        for chunk_index in missing_chunks:
            scorer({"id": np.array([chunk_index])})
    elif missing_chunks:
        _score_with_actors(missing_chunks, scorer_kwargs, workers)
    num_scored = sum(min(chunk_size, len(files) - n * chunk_size) for n in missing_chunks)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    return ScoringSummary(len(files), num_scored, time.perf_counter() - started_at, num_bytes)


def _score_with_actors(
    missing_chunks: list[int], scorer_kwargs: Mapping[str, Any], workers: WorkersConfig
) -> None:
    import ray.data

    check_plan(workers, allow_gpu_sharing=True)
    check_shared(scorer_kwargs["files"].paths, scorer_kwargs["folder"])
    ray.data.DataContext.get_current().enable_progress_bars = False
    # A task that created the blocks would wait without end for a CPU, which the actors occupy.
    chunks = [{"id": chunk_index} for chunk_index in missing_chunks]
    dataset = ray.data.from_items(chunks, override_num_blocks=len(chunks))
    max_actors = min(workers.num_workers, len(missing_chunks))
    dataset.map_batches(
        LogitScorer,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=min(workers.required_workers, max_actors), max_size=max_actors
        ),
        fn_constructor_kwargs=dict(scorer_kwargs),
        num_cpus=workers.cpus_per_worker,
        num_gpus=workers.gpus_per_worker,
    ).materialize()


class LogitScorer:
    """Scores chunks of a corpus.

    Args:
        files: The corpus.
        ranker: Checkpoint folder.
        folder: Folder of the chunks.
        chunk_size: Number of pairs of a chunk.
    """

    def __init__(self, files: ParquetTable, ranker: str, folder: Path, chunk_size: int) -> None:
        self.files, self.folder, self.chunk_size = files, folder, chunk_size
        self.ranker = as_packed_ranker(load(ranker))

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Writes the chunks whose indices are in the column `id`; returns that column."""
        for chunk_index in batch["id"].tolist():
            begin = chunk_index * self.chunk_size
            rows = np.arange(begin, min(begin + self.chunk_size, len(self.files)))
            table = self.files.take(rows, ["candidate_id", "question", "candidate"])
            texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
            batches = self.ranker.pack(self.ranker.tokenizer.encode(*texts))
            logits = self.ranker.predict_logits(batches, len(rows))
            if not np.isfinite(logits).all():
                num_wrong = int((~np.isfinite(logits)).any(1).sum())
                raise TrainingError(
                    f"{num_wrong:,} of {len(rows):,} pairs of chunk {chunk_index} have logits that "
                    "are not finite",
                    fix="score in fp32, or train the teacher again with a lower learning rate",
                )
            columns = dict(zip(LOGIT_COLUMNS, logits.T))
            chunk = pa.table({"candidate_id": table["candidate_id"], **columns})
            with atomic_file(_chunk_path(self.folder, chunk_index)) as path:
                pq.write_table(chunk, path, row_group_size=4_096, compression="zstd")
        return {"id": batch["id"]}


def _chunk_path(folder: Path, chunk_index: int) -> Path:
    return folder / f"part-{chunk_index:05d}.parquet"
