"""Orders the examples of an epoch and packs each rank's share of each step into batches.

An epoch shuffles blocks of examples, lays them end to end, cuts the result into windows and
shuffles inside each window. A step is the next `global_batch_size` examples. The order depends only
on seed and epoch, so every rank finds its share without communication, and a run can resume at any
step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from as2ray.errors import ConfigError
from as2ray.text.packing import PackedBatch, TokenSequences, ragged_arange, split_by_tokens

SHUFFLE_BLOCK = 2_048
"""Examples that stay together when an epoch is shuffled over the whole corpus."""

SHUFFLE_WINDOW = 32_768
"""Number of sequences, about, that are shuffled and tokenized together."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass: a packed part of a rank's share of a step."""

    step: int
    num_examples: int
    """Number of examples of the whole step over all ranks; the loss is divided by it."""
    is_last: bool
    """Whether this rank's share of the step ends here."""
    batch: PackedBatch

    @property
    def is_empty(self) -> bool:
        """Whether the batch is a placeholder, which only keeps the ranks in step."""
        return bool(self.batch.sequence_data["row"][0] < 0)

    def emptied(self) -> "MicroBatch":
        """Returns a placeholder for the same step."""
        return replace(self, batch=placeholder(self.batch))


class Encoded(Protocol):
    """Tokenized examples."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, shape [examples]."""

    def pack(self, indices: np.ndarray) -> PackedBatch:
        """Packs the selected examples into one batch."""


@dataclass(frozen=True)
class EncodedExamples:
    """Tokenized examples of one or several sequences each."""

    sequences: TokenSequences
    columns: Mapping[str, np.ndarray]
    """Data of each sequence, first axis [sequences]."""
    num_sequences: np.ndarray
    """Number of sequences of each example, shape [examples]."""

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of each example's first sequence, shape [examples]."""
        return np.asarray(np.cumsum(self.num_sequences) - self.num_sequences)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each example, shape [examples]."""
        return np.add.reduceat(self.sequences.lengths, self.starts)

    def pack(self, indices: np.ndarray) -> PackedBatch:
        """Packs the selected examples into one batch."""
        num_sequences = self.num_sequences[indices]
        sequence_indices = np.repeat(self.starts[indices], num_sequences)
        sequence_indices = sequence_indices + ragged_arange(num_sequences)
        return self.sequences.pack(sequence_indices, self.columns)


class ExampleReader(Protocol):
    """Reads the examples of a corpus: pairs, lists of candidates or passages."""

    @property
    def num_examples(self) -> int:
        """Number of examples of an epoch."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an example."""

    @property
    def max_sequences(self) -> int:
        """Maximum number of sequences of an example."""

    def sample_rows(self, examples: np.ndarray, seed: list[int]) -> np.ndarray:
        """Returns the row indices of examples, first axis [examples]; the same on every rank."""

    def encode(self, rows: np.ndarray) -> Encoded:
        """Reads and tokenizes rows that `sample_rows` returned."""


@dataclass(frozen=True)
class PackedDataset:
    """The epochs of a corpus as packed batches of one rank.

    Raises:
        ConfigError: `global_batch_size` is below 1, or an example may not fit `max_batch_tokens`.
    """

    reader: ExampleReader
    global_batch_size: int
    """Number of examples of a step over all ranks."""
    max_batch_tokens: int = 8_192
    """Maximum number of tokens of a batch."""
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    shuffle_window: int = SHUFFLE_WINDOW
    """Number of sequences, about, that are shuffled and tokenized together."""

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ConfigError(f"global_batch_size must be at least 1, not {self.global_batch_size}")
        if self.max_batch_tokens < self.reader.max_tokens:
            raise ConfigError(
                f"max_batch_tokens must be at least {self.reader.max_tokens:,}, the largest "
                f"possible example, not {self.max_batch_tokens:,}",
                fix="raise max_batch_tokens or lower max_length",
            )

    @property
    def steps(self) -> int:
        """Number of steps of an epoch; the last step may be smaller."""
        return -(-self.reader.num_examples // self.global_batch_size)

    @cached_property
    def steps_per_window(self) -> int:
        """Number of steps that are shuffled and tokenized together."""
        return max(1, self.shuffle_window // (self.global_batch_size * self.reader.max_sequences))

    @property
    def num_windows(self) -> int:
        """Number of shuffle windows of an epoch."""
        return -(-self.steps // self.steps_per_window)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yields the packed batches of this rank from step `start` on."""
        for window in range(start // self.steps_per_window, self.num_windows):
            yield from self.read_window(epoch, window, start)

    def read_window(self, epoch: int, window: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yields the packed batches of this rank in one window.

        Args:
            epoch: Number of the epoch, from 0.
            window: Number of the window, from 0.
            start: First step; steps count from the start of the epoch.
        """
        examples = self._shuffle(epoch, window)
        position = np.arange(len(examples))
        step = window * self.steps_per_window + position // self.global_batch_size
        is_mine = position % self.global_batch_size % self.world_size == self.rank
        is_mine &= step >= start
        rows = self.reader.sample_rows(examples, [self.seed, epoch, window])
        # A rank without an example in the window reads one example for the shapes of its columns.
        encoded = self.reader.encode(rows[is_mine] if is_mine.any() else rows[:1])
        first = 0
        for number, num_examples in zip(*np.unique(step[step >= start], return_counts=True)):
            share = np.arange(first, first + int(np.sum(is_mine & (step == number))))
            yield from self._pack_share(int(number), int(num_examples), encoded, share)
            first += len(share)

    def mean_length(self, num_samples: int = 4_096) -> float:
        """Returns the mean number of tokens of examples spread evenly over the corpus."""
        last = self.reader.num_examples - 1
        examples = np.linspace(0, last, min(num_samples, last + 1)).astype(np.int64)
        rows = self.reader.sample_rows(examples, [self.seed, 0, 0])
        return float(self.reader.encode(rows).lengths.mean())

    def _shuffle(self, epoch: int, window: int) -> np.ndarray:
        """Returns the indices of a window's examples in the order of the epoch."""
        total, size = self.reader.num_examples, self.steps_per_window * self.global_batch_size
        num_blocks = -(-total // SHUFFLE_BLOCK)
        blocks = np.random.default_rng([self.seed, epoch]).permutation(num_blocks)
        lengths = np.minimum(SHUFFLE_BLOCK, total - blocks * SHUFFLE_BLOCK)
        ends = np.cumsum(lengths)
        begin, end = window * size, min((window + 1) * size, total)
        first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end)
        in_window = slice(first, last + 1)
        examples = np.repeat(blocks[in_window] * SHUFFLE_BLOCK, lengths[in_window])
        examples = examples + ragged_arange(lengths[in_window])
        offset = begin - (ends[first] - lengths[first])
        examples = examples[offset : offset + end - begin]
        return np.random.default_rng([self.seed, epoch, window]).permutation(examples)

    def _pack_share(
        self, step: int, num_examples: int, encoded: Encoded, share: np.ndarray
    ) -> Iterator[MicroBatch]:
        if not len(share):
            any_example = encoded.pack(np.zeros(1, np.int64))
            yield MicroBatch(step, num_examples, True, placeholder(any_example))
            return
        lengths = encoded.lengths[share]
        # All windows of a passage stay in one batch, so a long passage gets a larger batch.
        groups = list(split_by_tokens(lengths, max(self.max_batch_tokens, int(lengths.max()))))
        for number, group in enumerate(groups, 1):
            batch = encoded.pack(share[group])
            yield MicroBatch(step, num_examples, number == len(groups), batch)


def placeholder(batch: PackedBatch) -> PackedBatch:
    """Returns a batch of one token that does not count for the loss: its `row` is -1.

    It has the columns of `batch`, all zero.
    """
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    sequence_data = {name: np.zeros_like(v[:1]) for name, v in batch.sequence_data.items()}
    marker_data = {name: np.zeros_like(v[:1]) for name, v in batch.marker_data.items()}
    sequence_data["row"] = np.full(1, -1)
    markers = np.zeros(1 if marker_data else 0, np.int64)
    return PackedBatch(zero, zero, zero, one, sequence_data, markers, marker_data)
