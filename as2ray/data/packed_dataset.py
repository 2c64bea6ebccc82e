"""The order of an epoch: which examples make up which step, on which rank, in which packed batch.

An epoch shuffles spans of examples, lays them end to end, cuts the result into windows and shuffles
inside each window. A step is the next `global_batch_size` examples. The order follows from seed and
epoch alone, so every rank finds its share without communication and a run resumes at any step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from as2ray.errors import ConfigError
from as2ray.text.packing import PackedBatch, TokenSequences, ragged_arange, split_by_tokens

SPAN = 2_048
"""Examples that stay together when an epoch is shuffled over the whole corpus."""

SHUFFLE_WINDOW = 32_768
"""About how many rows are shuffled and tokenized together."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass reads: a packed share of a step."""

    step: int
    num_examples: int
    """Of the whole step over all ranks: what the loss is divided by."""
    is_last: bool
    """Whether this rank's share of the step ends here."""
    batch: PackedBatch

    @property
    def is_empty(self) -> bool:
        """Whether the batch only keeps the ranks in step."""
        return bool(self.batch.sequence_data["row"][0] < 0)

    def emptied(self) -> "MicroBatch":
        """An empty batch for the same step."""
        return replace(self, batch=placeholder(self.batch))


class Encoded(Protocol):
    """Tokenized examples."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, shape [examples]."""

    def pack(self, which: np.ndarray) -> PackedBatch:
        """The examples `which` as one batch."""


@dataclass(frozen=True)
class EncodedExamples:
    """Examples of one or several token sequences each."""

    sequences: TokenSequences
    columns: Mapping[str, np.ndarray]
    """Data of each sequence, first axis [sequences]."""
    sizes: np.ndarray
    """TokenSequences of each example, shape [examples]."""

    @cached_property
    def starts(self) -> np.ndarray:
        """First sequence of each example, shape [examples]."""
        return np.asarray(np.cumsum(self.sizes) - self.sizes)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, shape [examples]."""
        return np.add.reduceat(self.sequences.lengths, self.starts)

    def pack(self, which: np.ndarray) -> PackedBatch:
        """The examples `which` as one batch."""
        sizes = self.sizes[which]
        rows = np.repeat(self.starts[which], sizes) + ragged_arange(sizes)
        return self.sequences.pack(rows, self.columns)


class ExampleReader(Protocol):
    """Reads the examples of a corpus: pairs, lists of candidates or passages."""

    @property
    def num_examples(self) -> int:
        """Examples of an epoch."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest example."""

    @property
    def max_sequences(self) -> int:
        """TokenSequences of the largest example."""

    def sample_rows(self, examples: np.ndarray, seed: list[int]) -> np.ndarray:
        """Row numbers of the examples, first axis [examples]; the same on every rank."""

    def encode(self, rows: np.ndarray) -> Encoded:
        """Reads and tokenizes rows of `sample_rows`."""


@dataclass(frozen=True)
class PackedDataset:
    """The epochs of a corpus as packed batches of one rank."""

    reader: ExampleReader
    global_batch_size: int
    """Examples of a step over all ranks."""
    max_batch_tokens: int = 8_192
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    shuffle_window: int = SHUFFLE_WINDOW

    def __post_init__(self) -> None:
        if self.global_batch_size < 1 or self.max_batch_tokens < self.reader.max_tokens:
            raise ConfigError(
                f"batch={self.global_batch_size}, max_tokens={self.max_batch_tokens:,}"
                f"; expected batch >= 1 and max_tokens >= {self.reader.max_tokens}",
            )

    @property
    def steps(self) -> int:
        """Steps of an epoch; the last may be smaller."""
        return -(-self.reader.num_examples // self.global_batch_size)

    @cached_property
    def steps_per_window(self) -> int:
        """Steps that are shuffled and tokenized together."""
        return max(1, self.shuffle_window // (self.global_batch_size * self.reader.max_sequences))

    @property
    def num_windows(self) -> int:
        """PassageWindows of an epoch."""
        return -(-self.steps // self.steps_per_window)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The packed batches of this rank from step `start` on."""
        for window in range(start // self.steps_per_window, self.num_windows):
            yield from self.read_window(epoch, window, start)

    def read_window(self, epoch: int, window: int, start: int = 0) -> Iterator[MicroBatch]:
        """The packed batches of this rank in one window, from step `start` of the epoch on."""
        examples = self._shuffle(epoch, window)
        position = np.arange(len(examples))
        step = window * self.steps_per_window + position // self.global_batch_size
        is_mine = position % self.global_batch_size % self.world_size == self.rank
        is_mine &= step >= start
        rows = self.reader.sample_rows(examples, [self.seed, epoch, window])
        # A rank without an example in the window reads one row for the shapes of its columns.
        encoded = self.reader.encode(rows[is_mine] if is_mine.any() else rows[:1])
        first = 0
        for number, num_examples in zip(*np.unique(step[step >= start], return_counts=True)):
            share = np.arange(first, first + int(np.sum(is_mine & (step == number))))
            yield from self._pack_share(int(number), int(num_examples), encoded, share)
            first += len(share)

    def mean_length(self, sample: int = 4_096) -> float:
        """Mean tokens of an example, over some spread evenly through the corpus."""
        last = self.reader.num_examples - 1
        examples = np.linspace(0, last, min(sample, last + 1)).astype(np.int64)
        rows = self.reader.sample_rows(examples, [self.seed, 0, 0])
        return float(self.reader.encode(rows).lengths.mean())

    def _shuffle(self, epoch: int, window: int) -> np.ndarray:
        """Numbers of a window's examples in the epoch's order."""
        total, size = self.reader.num_examples, self.steps_per_window * self.global_batch_size
        spans = np.random.default_rng([self.seed, epoch]).permutation(-(-total // SPAN))
        lengths = np.minimum(SPAN, total - spans * SPAN)
        ends = np.cumsum(lengths)
        begin, end = window * size, min((window + 1) * size, total)
        touched = slice(np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end) + 1)
        examples = np.repeat(spans[touched] * SPAN, lengths[touched])
        examples = examples + ragged_arange(lengths[touched])
        offset = begin - (ends[touched.start] - lengths[touched.start])
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
        # The windows of a passage stay together: a longer passage gets a larger batch.
        groups = list(split_by_tokens(lengths, max(self.max_batch_tokens, int(lengths.max()))))
        for number, group in enumerate(groups, 1):
            batch = encoded.pack(share[group])
            yield MicroBatch(step, num_examples, number == len(groups), batch)


def placeholder(batch: PackedBatch) -> PackedBatch:
    """One token with the columns of `batch`, all zero but `row`, which is -1: weighs nothing."""
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    sequence, marker = (
        {name: np.zeros((1, *v.shape[1:]), v.dtype) for name, v in columns.items()}
        for columns in (batch.sequence_data, batch.marker_data)
    )
    marks = np.zeros(len(marker) and 1, np.int64)
    return PackedBatch(zero, zero, zero, one, {**sequence, "row": np.full(1, -1)}, marks, marker)
