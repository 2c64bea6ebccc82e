"""Measures reading, tokenizing and packing: pairs per second, time to the first batch, memory.

as2ray's side is `distributed.ingest.RayBatchSource` over Parquet files. The baseline is the bare
tokenizer on the same two cores: `Tokenizer.encode_batch` over pairs in memory, with the tokenizer's
own threads and without reading, shuffling or packing.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from tokenizers import Tokenizer

from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.data.packed_dataset import SHUFFLE_WINDOW, MicroBatch, PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.distributed.ingest import RayBatchSource
from as2ray.profiling.speed_ratio import SpeedRatio, measure_alternately
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer
from benchmarks import asnq_shaped
from benchmarks.memory import MemoryMonitor, run_in_new_process
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    shuffle_window: int
    num_windows: int
    """Shuffle windows of the epoch whose rate is measured."""
    num_repeats: int
    epoch_sizes: tuple[int, ...]
    """Pairs of the epochs whose memory is compared."""


FULL = Size(SHUFFLE_WINDOW, 16, 3, (100_000, 2_000_000))
SMALL = Size(512, 6, 1, (4_096,))


@dataclass(frozen=True)
class EpochTiming:
    """Times of an epoch, in seconds from the call; rates include the startup."""

    num_pairs: int
    first_batch_s: float
    """Time of the first packed batch."""
    total_s: float

    @property
    def pairs_per_second(self) -> float:
        """Pairs per second from the call to the last batch."""
        return self.num_pairs / self.total_s


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    data_root = args.data if asnq_shaped.has_source_files(args.data) else None
    with TemporaryDirectory(prefix="as2ray-streaming-") as folder:
        corpora = {
            rows: asnq_shaped.write_corpus(Path(folder) / str(rows), rows, data_root)
            for rows in (*size.epoch_sizes, size.shuffle_window * size.num_windows)
        }
        epochs = [
            run_in_new_process(_run_epoch, corpora[rows], size.shuffle_window, args.cores)
            for rows in size.epoch_sizes
        ]
        ratios = run_in_new_process(
            _measure_ratios, corpora[size.shuffle_window * size.num_windows], size, args.cores
        )
    results = {
        "text": "made-up words" if data_root is None else "ASNQ's questions, SQuAD's sentences",
        "passes": epochs,
        "rates": {name: ratio.as_json() for name, ratio in ratios.items()},
    }
    write_report("streaming", args, _build_claims(epochs, ratios), results)


def _build_claims(epochs: list[dict[str, Any]], ratios: dict[str, SpeedRatio]) -> list[Claim]:
    memory = [p["memory"]["driver_mb"] + p["memory"]["workers_mb"] for p in epochs]
    pairs = [f"{p['epoch']['num_pairs']:,}" for p in epochs]
    slowest = max(p["first_batch_from_init"] for p in epochs)
    encode_batch, stores = ratios["encode_batch"], [p["memory"]["object_store_mb"] for p in epochs]
    rate = statistics.median(encode_batch.rates)
    return [
        Claim(
            f"ingest >= 85 % of encode_batch's rate ({rate:,.0f} pairs/s)",
            str(encode_batch),
            encode_batch.median >= 0.85,
        ),
        Claim("... of encode_batch_fast's rate", str(ratios["encode_batch_fast"]), None),
        Claim("... of one process without Ray", str(ratios["packed_dataset"]), None),
        Claim("first packed batch within 15 s of ray.init", f"{slowest:.1f} s", slowest <= 15),
        Claim(
            "... from the call of epoch()",
            f"{max(p['epoch']['first_batch_s'] for p in epochs):.1f} s",
            None,
        ),
        Claim(
            f"memory flat (within 10 %) over epochs of {', '.join(pairs)} pairs",
            ", ".join(f"{mb:,.0f} MB" for mb in memory),
            max(memory) <= 1.1 * min(memory) if len(memory) > 1 else None,
        ),
        Claim(
            "... worker processes",
            ", ".join(str(p["memory"]["num_worker_processes"]) for p in epochs),
            None,
        ),
        Claim("... object store", ", ".join(f"{s:,.0f} MB" for s in stores), None),
    ]


def _start_ray(num_cores: int) -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(address="local", num_cpus=num_cores, include_dashboard=False, logging_level="ERROR")


def _open_dataset(folder: Path, shuffle_window: int) -> PackedDataset:
    return PackedDataset(_open_reader(folder), 32, shuffle_window=shuffle_window)


def _open_reader(folder: Path) -> PairReader:
    return PairReader(ParquetTable.open(folder), PairTokenizer.from_folder(packaged_minilm()))


def _time_epoch(micro_batches: Iterable[MicroBatch]) -> EpochTiming:
    """Reads an epoch as fast as it is packed."""
    started_at = time.perf_counter()
    num_pairs, first_batch_s = 0, 0.0
    for micro_batch in micro_batches:
        num_pairs += len(micro_batch.batch)
        first_batch_s = first_batch_s or time.perf_counter() - started_at
    return EpochTiming(num_pairs, first_batch_s, time.perf_counter() - started_at)


def _run_epoch(folder: Path, shuffle_window: int, num_cores: int) -> dict[str, Any]:
    """Starts Ray and reads one epoch; returns its times and its memory."""
    num_cores = limit_cores(num_cores)
    dataset = _open_dataset(folder, shuffle_window)
    started_at = time.perf_counter()
    _start_ray(num_cores)
    init_s = time.perf_counter() - started_at
    with MemoryMonitor() as monitor:
        epoch = _time_epoch(RayBatchSource(dataset, float(num_cores)).epoch(0))
    ray.shutdown()
    return {
        "init": init_s,
        "first_batch_from_init": init_s + epoch.first_batch_s,
        "epoch": {**asdict(epoch), "pairs_per_second": epoch.pairs_per_second},
        "memory": asdict(monitor.peaks()),
    }


def _measure_ratios(folder: Path, size: Size, num_cores: int) -> dict[str, SpeedRatio]:
    """Compares as2ray with Ray to the bare tokenizer, and to as2ray in one process without Ray."""
    num_cores = limit_cores(num_cores)
    dataset, reader = _open_dataset(folder, size.shuffle_window), _open_reader(folder)
    bare_tokenizer = Tokenizer.from_str(reader.tokenizer.tokenizer_json)
    bare_tokenizer.no_padding()
    bare_tokenizer.enable_truncation(reader.tokenizer.max_length, strategy="only_second")
    table = reader.files.to_table().slice(0, 3 * size.shuffle_window)
    pairs = list(zip(table["question"].to_pylist(), table["candidate"].to_pylist()))
    source, epoch_numbers = RayBatchSource(dataset, float(num_cores)), count()

    def read_with_ray() -> float:
        return _time_epoch(source.epoch(next(epoch_numbers))).pairs_per_second

    def build_tokenizer_workload(
        encode: Callable[[list[tuple[str, str]]], object],
    ) -> Callable[[], float]:
        def workload() -> float:
            started_at = time.perf_counter()
            for start in range(0, len(pairs), size.shuffle_window):
                encode(pairs[start : start + size.shuffle_window])
            return len(pairs) / (time.perf_counter() - started_at)

        return workload

    def read_without_ray() -> float:
        started_at = time.perf_counter()
        batches = islice(dataset.epoch(next(epoch_numbers)), 3 * dataset.steps_per_window)
        num_pairs = sum(len(micro_batch.batch) for micro_batch in batches)
        return num_pairs / (time.perf_counter() - started_at)

    _start_ray(num_cores)
    baselines = {
        "encode_batch": build_tokenizer_workload(bare_tokenizer.encode_batch),
        "encode_batch_fast": build_tokenizer_workload(bare_tokenizer.encode_batch_fast),
        "packed_dataset": read_without_ray,
    }
    ratios = measure_alternately(read_with_ray, list(baselines.values()), size.num_repeats)
    ray.shutdown()
    return dict(zip(baselines, ratios))


if __name__ == "__main__":
    main()
