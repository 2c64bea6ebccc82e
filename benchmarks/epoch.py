"""One epoch of 23,662,238 pairs: read, shuffled, tokenised, packed, and consumed by two workers.

    python -m benchmarks.epoch --pairs 23662238 --output epoch.json

Knows the stream, its ingest by Ray Data, and the `datasets` library. Must not know models.

The corpus has the shape of the one that the Cascade Transformer and CERBERUS trained on: ASNQ's
57,242 questions with some 413 candidates each. Every worker is a process of its own that drives its
own share, as in training, and adds up a checksum over the rows it saw. `--cached` tokenises the
corpus once and reads token ids. The other side is a straight loop: `datasets` streams the same
files through its shuffle buffer, `tokenizers` encodes and pads batches of 32.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray

from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.data.packed_dataset import WINDOW, Stream
from as2ray.tables.parquet import ParquetTable
from as2ray.text.tokenization import PairTokenizer
from benchmarks import asnq_shaped
from benchmarks.consuming import consume_epoch, is_exact
from benchmarks.memory import MemoryMonitor, run_in_new_process
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.token_cache import CachedStream, write_tokens

NUM_WORKERS = 2
BATCH_SIZE = 32
EPOCH_SIZES = (100_000, 1_000_000, 10_000_000)
"""Pairs of the epochs that show how cost grows, as far as they are fewer than those asked for."""

SAMPLE_SIZE = 100_000
"""Pairs that the straight loop reads."""

SMALL_EPOCH_SIZES = (16_384,)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    sizes = (
        SMALL_EPOCH_SIZES
        if args.small
        else (*(n for n in EPOCH_SIZES if n < args.pairs), args.pairs)
    )
    data = args.data if asnq_shaped.has_source_files(args.data) else None
    sampled = next((n for n in sizes if n >= SAMPLE_SIZE), sizes[-1])
    passes, loop = [], {}
    for pairs in sizes:
        with TemporaryDirectory(prefix="as2ray-epoch-", dir=args.folder) as folder:
            # Apart, so that what it takes to make the corpus is not counted as the epoch's memory.
            made = Path(folder) / "texts"
            texts = run_in_new_process(
                asnq_shaped.write_corpus,
                made,
                pairs,
                data,
                asnq_shaped.PAPER_CANDIDATES_PER_QUESTION,
            )
            passes.append(run_in_new_process(_run_epoch, Path(folder), texts, pairs, args))
            if pairs == sampled:
                loop = run_in_new_process(_run_baseline, texts, min(SAMPLE_SIZE, pairs), args.cores)
    results = {
        "text": "made-up words" if data is None else "ASNQ's questions, SQuAD's sentences",
        "cached": args.cached,
        "passes": passes,
        "datasets": loop,
    }
    write_report("epoch", args, build_claims(passes, loop), results)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs", type=int, default=asnq_shaped.PAPER_NUM_PAIRS, help="of the epoch"
    )
    parser.add_argument("--cached", action="store_true", help="tokenise once, read token ids")
    parser.add_argument("--folder", type=Path, help="where the corpus is made, and removed")


def build_claims(epochs: list[dict[str, Any]], baseline: dict[str, float]) -> list[Claim]:
    """What epochs of growing size show, beside the straight loop's rate."""
    last, slopes = epochs[-1], _compute_seconds_per_pair(epochs)
    memory = [p["memory"]["driver"] + p["memory"]["workers"] for p in epochs]
    growth = max(slopes) / min(slopes)
    spilled = max(p["memory"]["spilled"] for p in epochs)
    named = f"an epoch of {last['pairs']:,} pairs"
    first = max(p["first"] for p in epochs)
    return [
        Claim(
            "every pair exactly once, both workers in step",
            "checksums",
            all(p["exact"] for p in epochs),
        ),
        Claim(f"{named}: pairs/s", f"{last['pairs'] / last['end']:,.0f}", None),
        Claim("... tokens/s", f"{last['tokens'] / last['end']:,.0f}", None),
        Claim("... seconds", f"{last['end']:,.0f}", None),
        Claim("first packed batch within 15 s of the call", f"{first:.1f} s", first <= 15),
        Claim(
            "cost grows linearly (within 20 %)",
            f"{growth:.2f}",
            _holds_if_several(slopes, growth <= 1.2),
        ),
        Claim(
            "memory flat (within 10 %) from the second epoch on",
            ", ".join(f"{m:,.0f} MB" for m in memory),
            _holds_if_several(
                memory[1:], max(memory[1:], default=0) <= 1.1 * min(memory[1:], default=0)
            ),
        ),
        Claim("nothing spilled", f"{spilled:,.0f} MB", spilled == 0),
        Claim(
            "times a straight loop over datasets' stream",
            f"{last['pairs'] / last['end'] / baseline['rate']:.2f}",
            None,
        ),
    ]


def _holds_if_several(values: Sequence[float], holds: bool) -> bool | None:
    """Nothing is claimed of one value alone."""
    return holds if len(values) > 1 else None


def _compute_seconds_per_pair(epochs: list[dict[str, Any]]) -> list[float]:
    """Seconds a pair between one size and the next: the start of an epoch is in neither."""
    ends = [(p["pairs"], p["end"]) for p in epochs]
    found = [(t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairwise(ends)]
    return found or [epochs[0]["end"] / epochs[0]["pairs"]]


def _run_epoch(
    folder: Path, corpus_folder: Path, num_pairs: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Consumes an epoch of a corpus from a cold start."""
    cores = limit_cores(args.cores)
    spill = folder / "spilled"
    spill.mkdir()
    ray.init(
        address="local",
        num_cpus=cores,
        include_dashboard=False,
        logging_level="ERROR",
        object_spilling_directory=str(spill),
    )
    tokenizer, files, seconds = (
        PairTokenizer.from_folder(packaged_minilm()),
        ParquetTable.open(corpus_folder),
        0.0,
    )
    kind = CachedStream if args.cached else Stream
    if args.cached:
        files, seconds = _tokenize_corpus(files, tokenizer, folder / "tokens")
    window = 2_048 if args.small else WINDOW
    streams = [
        kind(files, tokenizer, BATCH_SIZE, window=window, rank=rank, ranks=NUM_WORKERS)
        for rank in range(NUM_WORKERS)
    ]
    with MemoryMonitor(spill) as watch:
        worker = ray.remote(num_cpus=0)(consume_epoch)
        began = time.time()
        shares = ray.get([worker.remote(s, cores / NUM_WORKERS, began) for s in streams])
    ray.shutdown()
    return {
        "pairs": num_pairs,
        "tokens": sum(s.num_tokens for s in shares),
        "first": max(s.first_batch_s for s in shares),
        "end": max(s.total_s for s in shares),
        "exact": is_exact(shares, num_pairs, streams[0].steps),
        "tokenised_once_seconds": seconds,
        "bytes": sum(Path(path).stat().st_size for path in files.paths),
        "workers": [asdict(share) for share in shares],
        "memory": asdict(watch.peaks()),
    }


def _tokenize_corpus(
    files: ParquetTable, tokenizer: PairTokenizer, folder: Path
) -> tuple[ParquetTable, float]:
    """The corpus tokenised by tasks, a file each, and the seconds that took."""
    began = time.perf_counter()
    write = ray.remote(num_cpus=1)(write_tokens)
    ray.get([write.remote(path, tokenizer, folder) for path in files.paths])
    return ParquetTable.open(folder), time.perf_counter() - began


def _run_baseline(folder: Path, num_pairs: int, num_cores: int) -> dict[str, float]:
    """The straight loop over a sample: its clock, its rate, and its peak memory in MB."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    limit_cores(num_cores)
    tokenizer = Tokenizer.from_file(str(packaged_minilm() / "tokenizer.json"))
    tokenizer.enable_truncation(128, strategy="only_second")
    tokenizer.enable_padding()
    paths = sorted(map(str, folder.glob("*.parquet")))
    began, first, tokens = time.perf_counter(), 0.0, 0
    rows = load_dataset("parquet", data_files=paths, split="train", streaming=True)
    rows = rows.shuffle(seed=0, buffer_size=WINDOW).take(num_pairs)
    for batch in rows.iter(batch_size=BATCH_SIZE):
        encoded = tokenizer.encode_batch(list(zip(batch["question"], batch["candidate"])))
        ids = np.array([e.ids for e in encoded], np.int32)
        tokens += ids.size
        first = first or time.perf_counter() - began
    seconds = time.perf_counter() - began
    rates = {
        "pairs": num_pairs,
        "first": first,
        "rate": num_pairs / seconds,
        "padded_tokens": tokens,
    }
    return {**rates, "memory": getrusage(RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    main()
