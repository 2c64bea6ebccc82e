"""A worker that reads its share of an epoch as fast as it comes, and the proof that none is lost.

Knows the stream and its ingest by Ray Data. Must not know models, nor what is claimed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from as2ray.data.packed_dataset import WINDOW, Stream
from as2ray.distributed.ingest import RayBatchSource


@dataclass(frozen=True)
class WorkerReport:
    """What one worker saw of an epoch, and when, in seconds from the driver's call."""

    num_pairs: int
    num_tokens: int
    num_steps: int
    checksum: int
    """Sum of the scrambled numbers of its rows, modulo 2^64."""
    first_batch_s: float
    """Its first packed batch."""
    total_s: float


def consume_epoch(dataset: Stream, num_cpus: float, started_at: float) -> WorkerReport:
    """Reads a worker's share of an epoch as fast as it comes."""
    pairs = tokens = total = steps = 0
    last, first = -1, 0.0
    for micro in RayBatchSource(dataset, num_cpus).epoch(0):
        first = first or time.time() - started_at
        steps += micro.step > last  # they come in order
        last = micro.step
        if not micro.empty:
            pairs += len(micro.batch)
            tokens += micro.batch.num_tokens
            total += compute_checksum(micro.batch.sequence_data["row"])
    return WorkerReport(pairs, tokens, steps, total % 2**64, first, time.time() - started_at)


def is_exact(reports: Sequence[WorkerReport], num_pairs: int, num_steps: int) -> bool:
    """Whether the workers saw every row once, in as many steps."""
    expected = sum(
        compute_checksum(np.arange(start, min(start + WINDOW, num_pairs)))
        for start in range(0, num_pairs, WINDOW)
    )
    found = sum(share.checksum for share in reports)
    in_step = all(share.num_steps == num_steps for share in reports)
    return (
        in_step
        and sum(s.num_pairs for s in reports) == num_pairs
        and (found - expected) % 2**64 == 0
    )


def compute_checksum(row_numbers: np.ndarray) -> int:
    """Sum of row numbers, each scrambled (splitmix64), so that no swap leaves it as it was."""
    z = (row_numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
