"""Reads one epoch of 23,662,238 pairs: shuffled, tokenized, packed, and consumed by two workers.

    python -m benchmarks.epoch --pairs 23662238 --output epoch.json

The corpus has the shape of the one that the Cascade Transformer and CERBERUS trained on: ASNQ's
57,242 questions with about 413 candidates each. Every worker is a process that reads its own share,
as in training, and sums a checksum over its rows. `--cached` tokenizes the corpus once and reads
token ids. The baseline is a plain loop: `datasets` streams the same files through its shuffle
buffer, and `tokenizers` encodes and pads batches of 32.

    python -m benchmarks.epoch --pairs 1000000 --ranks 1,4,16,64

This simulates ranks one after another: how many rows they decode together in an epoch, and how fast
they pack the first window. Nothing is trained.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from as2ray.checkpoints.packaged import packaged_minilm
from as2ray.data.packed_dataset import SHUFFLE_WINDOW, PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.tables.parquet import ParquetTable
from as2ray.text.packing import TokenSequences
from as2ray.text.tokenization import PairTokenizer
from benchmarks import asnq_shaped
from benchmarks.consuming import consume_epoch, is_exact
from benchmarks.memory import MemoryMonitor, run_in_new_process
from benchmarks.report import Claim, limit_cores, parse_arguments, write_report
from benchmarks.token_cache import TokenCacheReader, write_tokens

NUM_WORKERS = 2
BATCH_SIZE = 32
EPOCH_SIZES = (100_000, 1_000_000, 10_000_000)
"""Pairs of the epochs that show how cost grows; only those below `--pairs` are run."""

SAMPLE_SIZE = 100_000
"""Pairs that the baseline reads."""

SMALL_EPOCH_SIZES = (16_384,)

RANKS_BATCH_SIZE = 1_024
NUM_SHARDS = 64
SMALL_NUM_SHARDS = 2
"""With so few shards, 16,384 pairs have spans of whole row groups."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    args = parse_arguments(__doc__, argv, _add_flags)
    if args.ranks:
        results = _measure_ranks(args)
        write_report("epoch", args, build_rank_claims(results), {"ranks": results})
        return
    sizes = (
        SMALL_EPOCH_SIZES
        if args.small
        else (*(n for n in EPOCH_SIZES if n < args.pairs), args.pairs)
    )
    data_root = args.data if asnq_shaped.has_source_files(args.data) else None
    baseline_size = next((n for n in sizes if n >= SAMPLE_SIZE), sizes[-1])
    epochs, baseline = [], {}
    for pairs in sizes:
        with TemporaryDirectory(prefix="as2ray-epoch-", dir=args.folder) as folder:
            # In another process, so that its memory is not counted as the epoch's.
            corpus_folder = run_in_new_process(
                asnq_shaped.write_corpus,
                Path(folder) / "texts",
                pairs,
                data_root,
                asnq_shaped.PAPER_CANDIDATES_PER_QUESTION,
            )
            epochs.append(run_in_new_process(_run_epoch, Path(folder), corpus_folder, pairs, args))
            if pairs == baseline_size:
                baseline = run_in_new_process(
                    _run_baseline, corpus_folder, min(SAMPLE_SIZE, pairs), args.cores
                )
    results = {
        "text": "made-up words" if data_root is None else "ASNQ's questions, SQuAD's sentences",
        "cached": args.cached,
        "passes": epochs,
        "datasets": baseline,
    }
    write_report("epoch", args, build_claims(epochs, baseline), results)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs", type=int, default=asnq_shaped.PAPER_NUM_PAIRS, help="pairs of the epoch"
    )
    parser.add_argument("--cached", action="store_true", help="tokenize once, read token ids")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(number) for number in text.split(",")],
        help="numbers of ranks to simulate",
    )
    parser.add_argument("--shards", type=int, help="shards of the simulated ranks")
    parser.add_argument("--folder", type=Path, help="folder for the temporary corpus")


def build_claims(epochs: list[dict[str, Any]], baseline: dict[str, float]) -> list[Claim]:
    """Returns the claims about epochs of growing size, and the ratio to the baseline."""
    last, slopes = epochs[-1], _compute_seconds_per_pair(epochs)
    memory = [p["memory"]["driver_mb"] + p["memory"]["workers_mb"] for p in epochs]
    growth = max(slopes) / min(slopes)
    spilled = max(p["memory"]["spilled_mb"] for p in epochs)
    setting = f"an epoch of {last['pairs']:,} pairs"
    first_batch_s = max(p["first"] for p in epochs)
    return [
        Claim(
            "every pair exactly once, both workers in step",
            "checksums",
            all(p["exact"] for p in epochs),
        ),
        Claim(f"{setting}: pairs/s", f"{last['pairs'] / last['end']:,.0f}", None),
        Claim("... tokens/s", f"{last['tokens'] / last['end']:,.0f}", None),
        Claim("... seconds", f"{last['end']:,.0f}", None),
        Claim(
            "first packed batch within 15 s of the call",
            f"{first_batch_s:.1f} s",
            first_batch_s <= 15,
        ),
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
            "times a plain loop over datasets' stream",
            f"{last['pairs'] / last['end'] / baseline['rate']:.2f}",
            None,
        ),
    ]


def build_rank_claims(results: Sequence[dict[str, Any]]) -> list[Claim]:
    """Returns the claims about reading with different numbers of ranks."""
    rates = [result["pairs_per_cpu_s"] for result in results]
    claims = [
        Claim(
            f"{result['ranks']} ranks: decoded / used rows at most 1.1",
            f"{result['decoded_per_used']:.3f}",
            result["decoded_per_used"] <= 1.1,
        )
        for result in results
    ]
    claims += [
        Claim(
            f"{result['ranks']} ranks: pairs per second and CPU, memory",
            f"{result['pairs_per_cpu_s']:,.0f}, {result['memory_mb']:,.0f} MB",
            None,
        )
        for result in results
    ]
    spread = max(rates) / min(rates)
    flat = _holds_if_several(rates, spread <= 1.2)
    return [*claims, Claim("pairs per second and CPU flat within 20 %", f"{spread:.2f}", flat)]


def _measure_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    data_root = args.data if asnq_shaped.has_source_files(args.data) else None
    num_pairs = SMALL_EPOCH_SIZES[0] if args.small else args.pairs
    num_shards = args.shards or (SMALL_NUM_SHARDS if args.small else NUM_SHARDS)
    with TemporaryDirectory(prefix="as2ray-epoch-", dir=args.folder) as folder:
        corpus_folder = run_in_new_process(
            asnq_shaped.write_corpus,
            Path(folder) / "texts",
            num_pairs,
            data_root,
            asnq_shaped.PAPER_CANDIDATES_PER_QUESTION,
        )
        return [
            run_in_new_process(_simulate_ranks, corpus_folder, num_ranks, num_shards)
            for num_ranks in args.ranks
        ]


class _UntokenizedReader(PairReader):
    """Reads texts and makes one token of each pair."""

    def tokenize(self, table: pa.Table) -> TokenSequences:
        ones = np.ones(table.num_rows, np.int32)
        return TokenSequences(ones, ones, ones)


def _simulate_ranks(corpus_folder: Path, num_ranks: int, num_shards: int) -> dict[str, Any]:
    """Reads an epoch with every rank, and packs the first window on one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    limit_cores(1)
    num_decoded, read_row_group = 0, pq.ParquetFile.read_row_group

    def count_rows(file: pq.ParquetFile, group: int, columns: list[str]) -> pa.Table:
        nonlocal num_decoded
        num_decoded += file.metadata.row_group(group).num_rows
        return read_row_group(file, group, columns)

    files, tokenizer = (
        ParquetTable.open(corpus_folder),
        PairTokenizer.from_folder(packaged_minilm()),
    )
    dataset = PackedDataset(
        PairReader(files, tokenizer), RANKS_BATCH_SIZE, world_size=num_ranks, num_shards=num_shards
    )
    ranks = [replace(dataset, rank=rank) for rank in range(num_ranks)]
    started_at, num_packed = time.process_time(), 0
    for rank in ranks:
        num_packed += sum(len(m.batch) for m in rank.read_window(0, 0) if not m.is_empty)
    packing_s, memory_mb = time.process_time() - started_at, getrusage(RUSAGE_SELF).ru_maxrss / 1024
    pq.ParquetFile.read_row_group = count_rows
    started_at, num_used = time.process_time(), 0
    for rank in ranks:
        rank = replace(rank, reader=_UntokenizedReader(files, tokenizer))
        num_used += sum(len(m.batch) for m in rank.epoch(0) if not m.is_empty)
    if num_used != len(files):
        raise RuntimeError(f"the ranks read {num_used:,} of {len(files):,} pairs")
    return {
        "ranks": num_ranks,
        "shards": num_shards,
        "decoded_per_used": num_decoded / num_used,
        "reading_s": time.process_time() - started_at,
        "pairs_per_cpu_s": num_packed / packing_s,
        "memory_mb": memory_mb,
    }


def _holds_if_several(values: Sequence[float], holds: bool) -> bool | None:
    """Returns None for a single value, of which nothing is claimed."""
    return holds if len(values) > 1 else None


def _compute_seconds_per_pair(epochs: list[dict[str, Any]]) -> list[float]:
    """Returns seconds per additional pair from one size to the next, without the startup."""
    ends = [(p["pairs"], p["end"]) for p in epochs]
    slopes = [(t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairwise(ends)]
    return slopes or [epochs[0]["end"] / epochs[0]["pairs"]]


def _run_epoch(
    folder: Path, corpus_folder: Path, num_pairs: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Reads an epoch of a corpus; Ray is started first."""
    cores = limit_cores(args.cores)
    spill_folder = folder / "spilled"
    spill_folder.mkdir()
    ray.init(
        address="local",
        num_cpus=cores,
        include_dashboard=False,
        logging_level="ERROR",
        object_spilling_directory=str(spill_folder),
    )
    tokenizer = PairTokenizer.from_folder(packaged_minilm())
    files, tokenization_s = ParquetTable.open(corpus_folder), 0.0
    reader_type = TokenCacheReader if args.cached else PairReader
    if args.cached:
        files, tokenization_s = _tokenize_corpus(files, tokenizer, folder / "tokens")
    datasets = [
        PackedDataset(
            reader_type(files, tokenizer),
            BATCH_SIZE,
            rank=rank,
            world_size=NUM_WORKERS,
            shuffle_window=2_048 if args.small else SHUFFLE_WINDOW,
        )
        for rank in range(NUM_WORKERS)
    ]
    with MemoryMonitor(spill_folder) as monitor:
        worker = ray.remote(num_cpus=0)(consume_epoch)
        started_at = time.time()
        num_cpus = cores / NUM_WORKERS
        reports = ray.get([worker.remote(d, num_cpus, started_at) for d in datasets])
    ray.shutdown()
    return {
        "pairs": num_pairs,
        "tokens": sum(s.num_tokens for s in reports),
        "first": max(s.first_batch_s for s in reports),
        "end": max(s.total_s for s in reports),
        "exact": is_exact(reports, num_pairs, datasets[0].steps),
        "tokenization_s": tokenization_s,
        "bytes": sum(Path(path).stat().st_size for path in files.paths),
        "workers": [asdict(report) for report in reports],
        "memory": asdict(monitor.peaks()),
    }


def _tokenize_corpus(
    files: ParquetTable, tokenizer: PairTokenizer, folder: Path
) -> tuple[ParquetTable, float]:
    """Tokenizes the corpus with one task per file; returns the new files and the seconds."""
    started_at = time.perf_counter()
    task = ray.remote(num_cpus=1)(write_tokens)
    ray.get([task.remote(path, tokenizer, folder) for path in files.paths])
    return ParquetTable.open(folder), time.perf_counter() - started_at


def _run_baseline(folder: Path, num_pairs: int, num_cores: int) -> dict[str, float]:
    """Runs the plain loop over a sample; returns its times, its rate and its peak memory in MB."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    limit_cores(num_cores)
    tokenizer = Tokenizer.from_file(str(packaged_minilm() / "tokenizer.json"))
    tokenizer.enable_truncation(128, strategy="only_second")
    tokenizer.enable_padding()
    paths = sorted(map(str, folder.glob("*.parquet")))
    started_at, first_batch_s, num_tokens = time.perf_counter(), 0.0, 0
    rows = load_dataset("parquet", data_files=paths, split="train", streaming=True)
    rows = rows.shuffle(seed=0, buffer_size=SHUFFLE_WINDOW).take(num_pairs)
    for batch in rows.iter(batch_size=BATCH_SIZE):
        encoded = tokenizer.encode_batch(list(zip(batch["question"], batch["candidate"])))
        ids = np.array([e.ids for e in encoded], np.int32)
        num_tokens += ids.size
        first_batch_s = first_batch_s or time.perf_counter() - started_at
    return {
        "pairs": num_pairs,
        "first": first_batch_s,
        "rate": num_pairs / (time.perf_counter() - started_at),
        "padded_tokens": num_tokens,
        "memory": getrusage(RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
