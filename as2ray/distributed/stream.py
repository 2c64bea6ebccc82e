"""Streams a table through the path of training into workers that only count."""

import logging
import resource
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from as2ray.data.packed_dataset import PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.distributed.cluster import check_shared, unwrap_ray_errors
from as2ray.distributed.ingest import RayBatchSource
from as2ray.distributed.plan import check_plan
from as2ray.distributed.workers_config import WorkersConfig, bundle_resources
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer

logger = logging.getLogger(__name__)

COUNTER_CPUS = 0.1
"""CPUs that a worker reserves for itself."""

REPORT_S = 5.0
"""Seconds between two lines of the log."""


@dataclass(frozen=True)
class StreamConfig:
    """What is streamed, as a training run would read it."""

    table: str
    """Folder of Parquet files with the columns of a candidates table."""
    tokenizer: str
    """Folder with the tokenizer of the model."""
    max_length: int = 128
    """Maximum number of tokens of a pair."""
    global_batch_size: int = 32
    num_data_shards: int = 1
    epochs: int = 1

    def open(self, rank: int, num_workers: int) -> PackedDataset:
        """Opens a worker's share."""
        tokenizer = PairTokenizer.from_folder(self.tokenizer, max_length=self.max_length)
        return PackedDataset(
            PairReader(ParquetTable.open(self.table), tokenizer),
            self.global_batch_size,
            rank=rank,
            world_size=num_workers,
            num_shards=self.num_data_shards,
        )


@dataclass(frozen=True)
class StreamCounts:
    """What the workers have counted of an epoch."""

    num_pairs: int = 0
    num_tokens: int = 0
    num_batches: int = 0
    wait_s: float = 0.0
    """Seconds in which workers waited for data, summed over the workers."""
    host_memory_gb: float = 0.0
    """Highest memory of a worker's process."""

    def __add__(self, other: "StreamCounts") -> "StreamCounts":
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        sums["host_memory_gb"] = max(self.host_memory_gb, other.host_memory_gb)
        return StreamCounts(**sums)


@dataclass(frozen=True)
class EpochReport:
    """An epoch of all workers."""

    counts: StreamCounts
    duration_s: float
    spilled_bytes: int
    """Bytes that Ray's object store wrote to disk; 0 if it is large enough."""
    stats: list[str]
    """Ray Data's statistics of each worker: times of each operator, and memory of its tasks."""

    @property
    def pairs_per_second(self) -> float:
        """Pairs per second, the start included."""
        return self.counts.num_pairs / self.duration_s

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, the start included."""
        return self.counts.num_tokens / self.duration_s


def stream(config: StreamConfig, workers: WorkersConfig) -> list[EpochReport]:
    """Reads epochs of a table with the workers and CPUs of a training run; logs the progress.

    Args:
        config: What is read.
        workers: Workers, which do nothing but count, and CPUs for reading.

    Raises:
        ResourceError: The workers do not fit on the cluster.
        CorpusError: The table cannot be read.
    """
    num_pairs = config.open(0, workers.num_workers).reader.num_examples
    check_plan(workers, allow_gpu_sharing=True)
    check_shared([config.table, config.tokenizer])
    bundle = {name: value for name, value in bundle_resources(workers).items() if name == "CPU"}
    group = placement_group([bundle] * workers.num_workers, workers.placement_strategy)
    try:
        counters = [
            ray.remote(_Counter)
            .options(
                num_cpus=workers.cpus_per_worker,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            )
            .remote(config, rank, workers)
            for rank in range(workers.num_workers)
        ]
        with unwrap_ray_errors():
            return [_run_epoch(counters, epoch, num_pairs) for epoch in range(config.epochs)]
    finally:
        remove_placement_group(group)


def _run_epoch(counters: list[Any], epoch: int, num_pairs: int) -> EpochReport:
    started_at, spilled = time.perf_counter(), _spilled_bytes()
    pending = [counter.run.remote(epoch) for counter in counters]
    while True:
        _, running = ray.wait(pending, num_returns=len(pending), timeout=REPORT_S)
        counts = sum(ray.get([c.counts.remote() for c in counters]), StreamCounts())
        duration_s = time.perf_counter() - started_at
        report = EpochReport(counts, duration_s, _spilled_bytes() - spilled, [])
        left_s = (num_pairs - counts.num_pairs) / max(1e-9, report.pairs_per_second)
        logger.info(
            "epoch %d: %s of %s pairs, %s pairs/s, %s tokens/s, %s left",
            epoch + 1,
            f"{counts.num_pairs:,}",
            f"{num_pairs:,}",
            f"{report.pairs_per_second:,.0f}",
            f"{report.tokens_per_second:,.0f}",
            timedelta(seconds=round(left_s)) if counts.num_pairs else "?",
        )
        if not running:
            return EpochReport(counts, duration_s, report.spilled_bytes, ray.get(pending))


def _spilled_bytes() -> int:
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.spilled_bytes_total)


class _Counter:
    """A worker that counts the pairs and tokens of its share."""

    def __init__(self, config: StreamConfig, rank: int, workers: WorkersConfig) -> None:
        self.dataset = config.open(rank, workers.num_workers)
        self.num_cpus = workers.num_data_cpus / workers.num_workers
        self.total = StreamCounts()

    def run(self, epoch: int) -> str:
        """Reads an epoch; returns Ray Data's statistics."""
        self.total, stats = StreamCounts(), list[str]()
        source = RayBatchSource(self.dataset, self.num_cpus, name="stream", on_end=stats.append)
        waiting_since = time.perf_counter()
        for micro_batch in source.epoch(epoch):
            batch = micro_batch.batch
            num_pairs = 0 if micro_batch.is_empty else len(batch)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
            wait_s = time.perf_counter() - waiting_since
            num_tokens = int(batch.lengths.sum()) if num_pairs else 0
            self.total += StreamCounts(num_pairs, num_tokens, 1, wait_s, memory)
            waiting_since = time.perf_counter()
        return "".join(stats)

    def counts(self) -> StreamCounts:
        """Returns what has been counted of the epoch."""
        return self.total
