"""Stored logits: a ranker scores a corpus once, in chunks that are whole or absent.

Knows Ray Data's actor pools. Must not know what the logits are for.

A chunk is one Parquet file, written under another name and renamed. Killed and started again, a
run redoes only the chunks that were in work.
"""

import os
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
from as2ray.distributed.plan import WorkersConfig, check_plan
from as2ray.errors import TrainingError
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import LOGIT_COLUMNS

CHUNK_SIZE = 65_536
"""Pairs of a chunk."""


@dataclass(frozen=True)
class ScoringSummary:
    """What a scoring run did."""

    num_pairs: int
    """Of the corpus."""
    num_scored: int
    """Of them in this run."""
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
    """Writes a ranker's logits of every pair beside the corpus.

    Args:
        table: Folder of a prepared table.
        ranker: Checkpoint folder; every ranker keeps its own tokenizer.
        folder: Where the chunks go; those that lie there are not made again.
        workers: Actors; 0 scores in this process.
        chunk: Pairs of a chunk.

    Raises:
        TrainingError: A logit is not finite.
    """
    files, folder = ParquetTable.open(table), Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "files": files,
        "ranker": str(Path(ranker).resolve()),
        "folder": folder,
        "chunk": chunk_size,
    }
    missing = [
        n for n in range(-(-len(files) // chunk_size)) if not _chunk_path(folder, n).exists()
    ]
    began = time.perf_counter()
    if workers.num_workers == 0:
        scorer = LogitScorer(**told)
        for number in missing:
            scorer({"id": np.array([number])})
    elif missing:
        _score_with_actors(missing, told, workers)
    scored = sum(min(chunk_size, len(files) - number * chunk_size) for number in missing)
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    return ScoringSummary(len(files), scored, time.perf_counter() - began, size)


def _score_with_actors(
    missing_chunks: list[int], scorer_kwargs: Mapping[str, Any], workers: WorkersConfig
) -> None:
    import ray.data

    check_plan(workers, allow_gpu_sharing=True)
    check_shared(scorer_kwargs["files"].paths, scorer_kwargs["folder"])
    ray.data.DataContext.get_current().enable_progress_bars = False
    # Blocks made here need no task: one would wait for ever for a CPU that the actors hold.
    chunks = [{"id": number} for number in missing_chunks]
    dataset = ray.data.from_items(chunks, override_num_blocks=len(missing_chunks))
    most = min(workers.num_workers, len(missing_chunks))
    dataset.map_batches(
        LogitScorer,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=min(workers.required_workers, most), max_size=most
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
        folder: Where the chunks go.
        chunk: Pairs of a chunk.
    """

    def __init__(self, files: ParquetTable, ranker: str, folder: Path, chunk_size: int) -> None:
        self.files, self.folder, self.chunk_size = files, folder, chunk_size
        self.ranker = load(ranker)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Writes the chunks of these numbers; gives the numbers back."""
        for number in batch["id"].tolist():
            begin = number * self.chunk_size
            rows = np.arange(begin, min(begin + self.chunk_size, len(self.files)))
            table = self.files.take(rows, ["candidate_id", "question", "candidate"])
            texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
            batches = self.ranker.pack(self.ranker.tokenizer.encode(*texts))
            logits = self.ranker.predict_logits(batches, len(rows))
            if not np.isfinite(logits).all():
                raise TrainingError(
                    f"{int((~np.isfinite(logits)).any(1).sum())} of {len(rows)} pairs of chunk "
                    f"{number} have logits that are not finite"
                    "; expected finite logits",
                    fix="score in fp32, or train the teacher again with a lower learning rate",
                )
            columns = dict(zip(LOGIT_COLUMNS, logits.T))
            self._write_chunk(number, pa.table({"candidate_id": table["candidate_id"], **columns}))
        return {"id": batch["id"]}

    def _write_chunk(self, chunk_index: int, table: pa.Table) -> None:
        path = _chunk_path(self.folder, chunk_index)
        part = path.with_suffix(f".{os.getpid()}.part")
        pq.write_table(table, part, row_group_size=4_096, compression="zstd")
        os.rename(part, path)


def _chunk_path(folder: Path, chunk_index: int) -> Path:
    return folder / f"part-{chunk_index:05d}.parquet"
