"""Streaming: pairs a second through read, tokenise and pack; time to the first batch; memory.

Knows the stream, its ingest by Ray Data, and the `tokenizers` library. Must not know models.

Our side is `distributed.ingest.RayEpochs` over Parquet files. The other is the bare tokenizer on
the same two cores: `Tokenizer.encode_batch` over pairs that lie in memory already, with the
tokenizer's own threads and nothing read, shuffled or packed.
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
from as2ray.data.packed_dataset import WINDOW, MicroBatch, Stream
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
    """Windows of the epoch whose rate is measured."""
    num_repeats: int
    epoch_sizes: tuple[int, ...]
    """Pairs of the epochs whose memory is compared."""


FULL = Size(WINDOW, 16, 3, (100_000, 2_000_000))
SMALL = Size(2_048, 6, 1, (16_384,))


@dataclass(frozen=True)
class EpochTiming:
    """An epoch's clock, in seconds from the call; its start is never left out of a rate."""

    num_pairs: int
    first_batch_s: float
    """The first packed batch."""
    total_s: float

    @property
    def pairs_per_second(self) -> float:
        """Pairs a second from the call to the last batch."""
        return self.num_pairs / self.total_s


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    data = args.data if asnq_shaped.has_source_files(args.data) else None
    with TemporaryDirectory(prefix="as2ray-streaming-") as folder:
        corpora = {
            rows: asnq_shaped.write_corpus(Path(folder) / str(rows), rows, data)
            for rows in (*size.epoch_sizes, size.shuffle_window * size.num_windows)
        }
        passes = [
            run_in_new_process(_run_epoch, corpora[rows], size.shuffle_window, args.cores)
            for rows in size.epoch_sizes
        ]
        rates = run_in_new_process(
            _measure_ratios, corpora[size.shuffle_window * size.num_windows], size, args.cores
        )
    results = {
        "text": "made-up words" if data is None else "ASNQ's questions, SQuAD's sentences",
        "passes": passes,
        "rates": {name: ratio.as_json() for name, ratio in rates.items()},
    }
    write_report("streaming", args, _build_claims(passes, rates), results)


def _build_claims(epochs: list[dict[str, Any]], ratios: dict[str, SpeedRatio]) -> list[Claim]:
    memory = [p["memory"]["driver"] + p["memory"]["workers"] for p in epochs]
    pairs = [f"{p['epoch']['pairs']:,}" for p in epochs]
    slowest = max(p["first_batch_from_init"] for p in epochs)
    bare, stores = ratios["encode_batch"], [p["memory"]["object_store"] for p in epochs]
    mine = statistics.median(bare.rates)
    return [
        Claim(
            f"ingest >= 85 % of encode_batch's rate ({mine:,.0f} pairs/s)",
            str(bare),
            bare.median >= 0.85,
        ),
        Claim("... of encode_batch_fast's rate", str(ratios["encode_batch_fast"]), None),
        Claim("... of the stream's in this process, without Ray", str(ratios["stream"]), None),
        Claim("first packed batch within 15 s of ray.init", f"{slowest:.1f} s", slowest <= 15),
        Claim(
            "... from the call of epoch()",
            f"{max(p['epoch']['first'] for p in epochs):.1f} s",
            None,
        ),
        Claim(
            f"memory flat (within 10 %) over epochs of {', '.join(pairs)} pairs",
            ", ".join(f"{mb:,.0f} MB" for mb in memory),
            max(memory) <= 1.1 * min(memory) if len(memory) > 1 else None,
        ),
        Claim(
            "... worker processes", ", ".join(str(p["memory"]["processes"]) for p in epochs), None
        ),
        Claim("... object store", ", ".join(f"{s:,.0f} MB" for s in stores), None),
    ]


def _start_ray(num_cores: int) -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(address="local", num_cpus=num_cores, include_dashboard=False, logging_level="ERROR")


def _open_dataset(folder: Path, shuffle_window: int) -> Stream:
    return Stream(
        ParquetTable.open(folder),
        PairTokenizer.from_folder(packaged_minilm()),
        32,
        window=shuffle_window,
    )


def _time_epoch(micro_batches: Iterable[MicroBatch]) -> EpochTiming:
    """Reads an epoch as fast as it comes."""
    began = time.perf_counter()
    pairs, first = 0, 0.0
    for micro in micro_batches:
        pairs += len(micro.batch)
        first = first or time.perf_counter() - began
    return EpochTiming(pairs, first, time.perf_counter() - began)


def _run_epoch(folder: Path, shuffle_window: int, num_cores: int) -> dict[str, Any]:
    """One epoch from a cold start: its clock and its memory."""
    num_cores = limit_cores(num_cores)
    stream = _open_dataset(folder, shuffle_window)
    began = time.perf_counter()
    _start_ray(num_cores)
    called = time.perf_counter() - began
    with MemoryMonitor() as watch:
        epoch = _time_epoch(RayBatchSource(stream, float(num_cores)).epoch(0))
    ray.shutdown()
    return {
        "init": called,
        "first_batch_from_init": called + epoch.first_batch_s,
        "epoch": {**asdict(epoch), "rate": epoch.pairs_per_second},
        "memory": asdict(watch.peaks()),
    }


def _measure_ratios(folder: Path, size: Size, num_cores: int) -> dict[str, SpeedRatio]:
    """Our rate over those of the bare tokenizer and of the stream without Ray."""
    num_cores = limit_cores(num_cores)
    stream = _open_dataset(folder, size.shuffle_window)
    bare = Tokenizer.from_str(stream.tokenizer.tokenizer_json)
    bare.no_padding()
    bare.enable_truncation(stream.tokenizer.max_length, strategy="only_second")
    table = stream.files.to_table().slice(0, 3 * size.shuffle_window)
    pairs = list(zip(table["question"].to_pylist(), table["candidate"].to_pylist()))
    epochs, numbers = RayBatchSource(stream, float(num_cores)), count()

    def ingest() -> float:
        return _time_epoch(epochs.epoch(next(numbers))).pairs_per_second

    def tokenizer(encode: Callable[[list[tuple[str, str]]], object]) -> Callable[[], float]:
        def side() -> float:
            began = time.perf_counter()
            for start in range(0, len(pairs), size.shuffle_window):
                encode(pairs[start : start + size.shuffle_window])
            return len(pairs) / (time.perf_counter() - began)

        return side

    def alone() -> float:
        began = time.perf_counter()
        micros = islice(stream.epoch(next(numbers)), 3 * stream.steps_a_window)
        return sum(len(micro.batch) for micro in micros) / (time.perf_counter() - began)

    _start_ray(num_cores)
    sides = {
        "encode_batch": tokenizer(bare.encode_batch),
        "encode_batch_fast": tokenizer(bare.encode_batch_fast),
        "stream": alone,
    }
    ratios = measure_alternately(ingest, list(sides.values()), size.num_repeats)
    ray.shutdown()
    return dict(zip(sides, ratios))


if __name__ == "__main__":
    main()
