"""Reads epochs as fast as they are packed, and proves by checksums that every row came once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from as2ray.data.packed_dataset import SHUFFLE_WINDOW, PackedDataset
from as2ray.distributed.ingest import RayBatchSource


@dataclass(frozen=True)
class WorkerReport:
    """What one worker read of an epoch; times are seconds from the driver's call."""

    num_pairs: int
    num_tokens: int
    num_steps: int
    checksum: int
    """Sum of the hashes of its row numbers, modulo 2^64."""
    first_batch_s: float
    """Time of the first packed batch."""
    total_s: float


def consume_epoch(dataset: PackedDataset, num_cpus: float, started_at: float) -> WorkerReport:
    """Reads a worker's share of an epoch as fast as it is packed."""
    num_pairs = num_tokens = checksum = num_steps = 0
    last_step, first_batch_s = -1, 0.0
    for micro in RayBatchSource(dataset, num_cpus).epoch(0):
        first_batch_s = first_batch_s or time.time() - started_at
        num_steps += micro.step > last_step  # steps are in ascending order
        last_step = micro.step
        if not micro.is_empty:
            num_pairs += len(micro.batch)
            num_tokens += micro.batch.num_tokens
            checksum += compute_checksum(micro.batch.sequence_data["row"])
    total_s = time.time() - started_at
    return WorkerReport(num_pairs, num_tokens, num_steps, checksum % 2**64, first_batch_s, total_s)


def is_exact(reports: Sequence[WorkerReport], num_pairs: int, num_steps: int) -> bool:
    """Returns whether the workers read every row once, in the same number of steps."""
    expected = sum(
        compute_checksum(np.arange(start, min(start + SHUFFLE_WINDOW, num_pairs)))
        for start in range(0, num_pairs, SHUFFLE_WINDOW)
    )
    checksum = sum(report.checksum for report in reports)
    return (
        all(report.num_steps == num_steps for report in reports)
        and sum(report.num_pairs for report in reports) == num_pairs
        and (checksum - expected) % 2**64 == 0
    )


def compute_checksum(row_numbers: np.ndarray) -> int:
    """Sums hashes (splitmix64) of row numbers, so that swapping rows changes the sum."""
    z = (row_numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
