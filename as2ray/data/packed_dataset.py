"""Orders the examples of an epoch and packs each rank's share of each step into batches.

An epoch shuffles spans of adjacent examples, lays them end to end and cuts the result into windows.
The spans of a window are dealt to `num_shards` shards, every shard shuffles its examples, and the
order of the window takes one example of each shard in turn. A step is the next `global_batch_size`
examples. The order depends on seed, epoch and number of shards, but not on the ranks, so every rank
finds its share without communication, and a run can resume at any step.

A rank reads only some of the shards. A span is a row group of the files, so with at least as many
shards as ranks the ranks together decode little more than they use.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from as2ray.errors import ConfigError
from as2ray.text.packing import PackedBatch, TokenSequences, ragged_arange, split_by_tokens

ORDER_VERSION = 1
"""Version of the order of examples, which changes the result of a run. Raise it when they come in
another order for the same seed, epoch, number of shards and `global_batch_size`."""

SHUFFLE_BLOCK = 2_048
"""Examples that stay together when an epoch is shuffled over the whole corpus: as many as a row
group of a prepared table has rows. A power of two."""

MIN_SPANS_PER_SHARD = 4
"""Spans that each of several shards has at least; small corpora get smaller spans instead."""

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
    num_shards: int = 1
    """Number of shards that the spans of an epoch are dealt to; changes the order of examples. A
    window holds at least a span of every shard that the rank reads."""

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

    @property
    def steps_per_window(self) -> int:
        """Number of steps, about, that are shuffled and tokenized together."""
        return max(1, self._window_size // self.global_batch_size)

    @property
    def num_windows(self) -> int:
        """Number of shuffle windows of an epoch."""
        return -(-self.reader.num_examples // self._window_size)

    def find_window(self, epoch: int, step: int) -> int:
        """Returns the window in which a step of an epoch begins."""
        _, _, bounds = self._shuffle_spans(epoch)
        return int(np.searchsorted(bounds, step * self.global_batch_size, side="right")) - 1

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yields the packed batches of this rank from step `start` on."""
        for window in range(self.find_window(epoch, start), self.num_windows):
            yield from self.read_window(epoch, window, start)

    def read_window(self, epoch: int, window: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yields the packed batches of this rank in one window.

        With several shards a step can begin in one window and end in the next, which then yields
        the rest of it.

        Args:
            epoch: Number of the epoch, from 0.
            window: Number of the window, from 0.
            start: First step; steps count from the start of the epoch.
        """
        total, size = self.reader.num_examples, self.global_batch_size
        begin, end, rows, positions = self._order_share(epoch, window)
        step = positions // size
        rows, step = rows[step >= start], step[step >= start]
        if not len(rows):  # one example for the shapes of its columns
            rows = self.reader.sample_rows(np.zeros(1, np.int64), [self.seed])
        encoded = self.reader.encode(rows)
        for number in range(max(start, begin // size), -(-end // size)):
            share = np.arange(*np.searchsorted(step, [number, number + 1]))
            last = min((number + 1) * size, total)
            is_complete = last <= end
            yield from self._pack_share(number, last - number * size, encoded, share, is_complete)

    def mean_length(self, num_samples: int = 4_096) -> float:
        """Returns the mean number of tokens of examples spread evenly over the corpus."""
        last = self.reader.num_examples - 1
        examples = np.linspace(0, last, min(num_samples, last + 1)).astype(np.int64)
        rows = self.reader.sample_rows(examples, [self.seed, 0, 0])
        return float(self.reader.encode(rows).lengths.mean())

    @property
    def _span(self) -> int:
        """Number of adjacent examples that stay together when an epoch is shuffled."""
        if self.num_shards == 1:
            return SHUFFLE_BLOCK
        span = self.reader.num_examples // (self.num_shards * MIN_SPANS_PER_SHARD)
        span = max(1, min(span, SHUFFLE_BLOCK // self.reader.max_sequences))
        return 1 << span.bit_length() - 1  # spans of a power of two do not cross row groups

    @property
    def _window_size(self) -> int:
        """Number of examples of a window: whole steps, or whole spans of each of several shards."""
        unit = self.num_shards * self._span if self.num_shards > 1 else self.global_batch_size
        return unit * max(1, self.shuffle_window // (unit * self.reader.max_sequences))

    def _shuffle_spans(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Orders the spans of an epoch.

        Returns:
            The first example of each span, shape [spans]; the positions in the epoch between which
            spans lie, shape [spans + 1], and between which windows lie, shape [windows + 1].
        """
        total, span, size = self.reader.num_examples, self._span, self._window_size
        starts = np.random.default_rng([self.seed, epoch]).permutation(-(-total // span)) * span
        edges = np.append(0, np.cumsum(np.minimum(span, total - starts)))
        begins = edges[:-1][:: size // span] if self.num_shards > 1 else np.arange(0, total, size)
        return starts, edges, np.append(begins, total)

    def _order_share(self, epoch: int, window: int) -> tuple[int, int, np.ndarray, np.ndarray]:
        """Orders this rank's share of a window.

        If R ranks divide V shards, rank r has the shards v with v % R == r. Otherwise V / g shards
        and R / g ranks, g being the common divisor, share their work evenly: the shards lie end to
        end, and a rank has an interval of them. Of a shard that it shares it has some turns.

        Returns:
            The positions in the epoch where the window begins and ends, the rows of this rank's
            examples, and their positions, ascending.
        """
        starts, edges, bounds = self._shuffle_spans(epoch)
        begin, end = bounds[window : window + 2].tolist()
        first, last = np.maximum(edges[:-1], begin), np.minimum(edges[1:], end)
        is_inside = first < last
        starts, lengths = (starts + first - edges[:-1])[is_inside], (last - first)[is_inside]
        sizes = np.array(
            [lengths[shard :: self.num_shards].sum() for shard in range(self.num_shards)]
        )
        num_groups = math.gcd(self.num_shards, self.world_size)
        num_shards, num_ranks = self.num_shards // num_groups, self.world_size // num_groups
        rank, group = divmod(self.rank, num_groups)
        rows, positions = [], []
        for number in range(
            rank * num_shards // num_ranks, -(-(rank + 1) * num_shards // num_ranks)
        ):
            shard = number * num_groups + group
            length = lengths[shard :: self.num_shards]
            examples = np.repeat(starts[shard :: self.num_shards], length) + ragged_arange(length)
            seed = [self.seed, epoch, window, *([shard] if self.num_shards > 1 else [])]
            examples = np.random.default_rng(seed).permutation(examples)
            # Before the n-th example of this shard come n of every shard, or all where it has
            # fewer, and one more of the shards that precede it in a turn.
            n = np.arange(len(examples))
            position = (
                begin + np.minimum(sizes[:, None], n).sum(0) + (sizes[:shard, None] > n).sum(0)
            )
            turn = position % self.global_batch_size // self.num_shards % num_ranks
            is_mine = (number * num_ranks + turn) // num_shards == rank
            rows.append(self.reader.sample_rows(examples, seed)[is_mine])
            positions.append(position[is_mine])
        order = np.argsort(np.concatenate(positions))
        return begin, end, np.concatenate(rows)[order], np.concatenate(positions)[order]

    def _pack_share(
        self, step: int, num_examples: int, encoded: Encoded, share: np.ndarray, is_complete: bool
    ) -> Iterator[MicroBatch]:
        if not len(share):
            any_example = encoded.pack(np.zeros(1, np.int64))
            yield MicroBatch(step, num_examples, is_complete, placeholder(any_example))
            return
        lengths = encoded.lengths[share]
        # All windows of a passage stay in one batch, so a long passage gets a larger batch.
        groups = list(split_by_tokens(lengths, max(self.max_batch_tokens, int(lengths.max()))))
        for number, group in enumerate(groups, 1):
            batch = encoded.pack(share[group])
            is_last = is_complete and number == len(groups)
            yield MicroBatch(step, num_examples, is_last, batch)


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
