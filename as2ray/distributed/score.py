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

from as2ray import checkpoint
from as2ray.distributed.cluster import check_shared
from as2ray.distributed.plan import Workers, check
from as2ray.errors import TrainingError
from as2ray.text.files import PairFiles
from as2ray.text.stream import LOGITS

CHUNK = 65_536
"""Pairs of a chunk."""


@dataclass(frozen=True)
class Rate:
    """What a scoring run did."""

    pairs: int
    """Of the corpus."""
    scored: int
    """Of them in this run."""
    seconds: float
    bytes: int
    """Size of all chunks."""


def score(
    table: str | Path, ranker: str | Path, folder: str | Path, workers: Workers, chunk: int = CHUNK
) -> Rate:
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
    files, folder = PairFiles.find(table), Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "files": files,
        "ranker": str(Path(ranker).resolve()),
        "folder": folder,
        "chunk": chunk,
    }
    missing = [n for n in range(-(-len(files) // chunk)) if not _path(folder, n).exists()]
    began = time.perf_counter()
    if workers.count == 0:
        scorer = Scorer(**told)
        for number in missing:
            scorer({"id": np.array([number])})
    elif missing:
        _with_actors(missing, told, workers)
    scored = sum(min(chunk, len(files) - number * chunk) for number in missing)
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    return Rate(len(files), scored, time.perf_counter() - began, size)


def _with_actors(missing: list[int], told: Mapping[str, Any], workers: Workers) -> None:
    import ray.data

    check(workers, sharing=True)
    check_shared(told["files"].paths, told["folder"])
    ray.data.DataContext.get_current().enable_progress_bars = False
    # Blocks made here need no task: one would wait for ever for a CPU that the actors hold.
    chunks = [{"id": number} for number in missing]
    dataset = ray.data.from_items(chunks, override_num_blocks=len(missing))
    most = min(workers.count, len(missing))
    dataset.map_batches(
        Scorer,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=min(workers.needed, most), max_size=most),
        fn_constructor_kwargs=dict(told),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
    ).materialize()


class Scorer:
    """Scores chunks of a corpus.

    Args:
        files: The corpus.
        ranker: Checkpoint folder.
        folder: Where the chunks go.
        chunk: Pairs of a chunk.
    """

    def __init__(self, files: PairFiles, ranker: str, folder: Path, chunk: int) -> None:
        self.files, self.folder, self.chunk = files, folder, chunk
        self.ranker = checkpoint.load(ranker)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Writes the chunks of these numbers; gives the numbers back."""
        for number in batch["id"].tolist():
            begin = number * self.chunk
            rows = np.arange(begin, min(begin + self.chunk, len(self.files)))
            table = self.files.read(rows, ["candidate_id", "question", "candidate"])
            texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
            batches = self.ranker.pack(self.ranker.tokenizer.encode(*texts))
            logits = self.ranker.logits(batches, len(rows))
            if not np.isfinite(logits).all():
                raise TrainingError(
                    f"{int((~np.isfinite(logits)).any(1).sum())} of {len(rows)} pairs of chunk "
                    f"{number} have logits that are not finite",
                    expected="finite logits",
                    mend="score in fp32, or train the teacher again with a lower learning rate",
                )
            columns = dict(zip(LOGITS, logits.T))
            self._write(number, pa.table({"candidate_id": table["candidate_id"], **columns}))
        return {"id": batch["id"]}

    def _write(self, number: int, table: pa.Table) -> None:
        path = _path(self.folder, number)
        part = path.with_suffix(f".{os.getpid()}.part")
        pq.write_table(table, part, row_group_size=4_096, compression="zstd")
        os.rename(part, path)


def _path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.parquet"
