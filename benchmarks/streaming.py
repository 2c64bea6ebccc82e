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

from as2ray.distributed.ingest import RayEpochs
from as2ray.evaluation.ratio import Ratio, alternate
from as2ray.packaged import minilm
from as2ray.text.files import PairFiles
from as2ray.text.stream import WINDOW, MicroBatch, Stream
from as2ray.text.tokens import PairTokenizer
from benchmarks import asnq_shaped
from benchmarks.memory import Watch, apart
from benchmarks.report import Claim, arguments, finish, hold_to_cores


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    window: int
    windows: int
    """Windows of the epoch whose rate is measured."""
    repeats: int
    passes: tuple[int, ...]
    """Pairs of the epochs whose memory is compared."""


FULL = Size(WINDOW, 16, 3, (100_000, 2_000_000))
SMALL = Size(2_048, 6, 1, (16_384,))


@dataclass(frozen=True)
class Epoch:
    """An epoch's clock, in seconds from the call; its start is never left out of a rate."""

    pairs: int
    first: float
    """The first packed batch."""
    end: float

    @property
    def rate(self) -> float:
        """Pairs a second from the call to the last batch."""
        return self.pairs / self.end


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = arguments(__doc__, argv)
    size = SMALL if args.small else FULL
    data = args.data if asnq_shaped.present(args.data) else None
    with TemporaryDirectory(prefix="as2ray-streaming-") as folder:
        corpora = {
            rows: asnq_shaped.write(Path(folder) / str(rows), rows, data)
            for rows in (*size.passes, size.window * size.windows)
        }
        passes = [apart(_pass, corpora[rows], size.window, args.cores) for rows in size.passes]
        rates = apart(_rates, corpora[size.window * size.windows], size, args.cores)
    results = {
        "text": "made-up words" if data is None else "ASNQ's questions, SQuAD's sentences",
        "passes": passes,
        "rates": {name: ratio.as_json() for name, ratio in rates.items()},
    }
    finish("streaming", args, _claims(passes, rates), results)


def _claims(passes: list[dict[str, Any]], rates: dict[str, Ratio]) -> list[Claim]:
    memory = [p["memory"]["driver"] + p["memory"]["workers"] for p in passes]
    pairs = [f"{p['epoch']['pairs']:,}" for p in passes]
    slowest = max(p["first_batch_from_init"] for p in passes)
    bare, stores = rates["encode_batch"], [p["memory"]["object_store"] for p in passes]
    mine = statistics.median(bare.ours)
    return [
        Claim(
            f"ingest >= 85 % of encode_batch's rate ({mine:,.0f} pairs/s)",
            str(bare),
            bare.median >= 0.85,
        ),
        Claim("... of encode_batch_fast's rate", str(rates["encode_batch_fast"]), None),
        Claim("... of the stream's in this process, without Ray", str(rates["stream"]), None),
        Claim("first packed batch within 15 s of ray.init", f"{slowest:.1f} s", slowest <= 15),
        Claim(
            "... from the call of epoch()",
            f"{max(p['epoch']['first'] for p in passes):.1f} s",
            None,
        ),
        Claim(
            f"memory flat (within 10 %) over epochs of {', '.join(pairs)} pairs",
            ", ".join(f"{mb:,.0f} MB" for mb in memory),
            max(memory) <= 1.1 * min(memory) if len(memory) > 1 else None,
        ),
        Claim(
            "... worker processes", ", ".join(str(p["memory"]["processes"]) for p in passes), None
        ),
        Claim("... object store", ", ".join(f"{s:,.0f} MB" for s in stores), None),
    ]


def _connect(cores: int) -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(address="local", num_cpus=cores, include_dashboard=False, logging_level="ERROR")


def _stream(folder: Path, window: int) -> Stream:
    return Stream(PairFiles.find(folder), PairTokenizer.from_folder(minilm()), 32, window=window)


def _timed(micros: Iterable[MicroBatch]) -> Epoch:
    """Reads an epoch as fast as it comes."""
    began = time.perf_counter()
    pairs, first = 0, 0.0
    for micro in micros:
        pairs += len(micro.batch)
        first = first or time.perf_counter() - began
    return Epoch(pairs, first, time.perf_counter() - began)


def _pass(folder: Path, window: int, cores: int) -> dict[str, Any]:
    """One epoch from a cold start: its clock and its memory."""
    cores = hold_to_cores(cores)
    stream = _stream(folder, window)
    began = time.perf_counter()
    _connect(cores)
    called = time.perf_counter() - began
    with Watch() as watch:
        epoch = _timed(RayEpochs(stream, float(cores)).epoch(0))
    ray.shutdown()
    return {
        "init": called,
        "first_batch_from_init": called + epoch.first,
        "epoch": {**asdict(epoch), "rate": epoch.rate},
        "memory": asdict(watch.peaks()),
    }


def _rates(folder: Path, size: Size, cores: int) -> dict[str, Ratio]:
    """Our rate over those of the bare tokenizer and of the stream without Ray."""
    cores = hold_to_cores(cores)
    stream = _stream(folder, size.window)
    bare = Tokenizer.from_str(stream.tokenizer.definition)
    bare.no_padding()
    bare.enable_truncation(stream.tokenizer.max_length, strategy="only_second")
    table = stream.files.table().slice(0, 3 * size.window)
    pairs = list(zip(table["question"].to_pylist(), table["candidate"].to_pylist()))
    epochs, numbers = RayEpochs(stream, float(cores)), count()

    def ingest() -> float:
        return _timed(epochs.epoch(next(numbers))).rate

    def tokenizer(encode: Callable[[list[tuple[str, str]]], object]) -> Callable[[], float]:
        def side() -> float:
            began = time.perf_counter()
            for start in range(0, len(pairs), size.window):
                encode(pairs[start : start + size.window])
            return len(pairs) / (time.perf_counter() - began)

        return side

    def alone() -> float:
        began = time.perf_counter()
        micros = islice(stream.epoch(next(numbers)), 3 * stream.steps_a_window)
        return sum(len(micro.batch) for micro in micros) / (time.perf_counter() - began)

    _connect(cores)
    sides = {
        "encode_batch": tokenizer(bare.encode_batch),
        "encode_batch_fast": tokenizer(bare.encode_batch_fast),
        "stream": alone,
    }
    ratios = alternate(ingest, list(sides.values()), size.repeats)
    ray.shutdown()
    return dict(zip(sides, ratios))


if __name__ == "__main__":
    main()
