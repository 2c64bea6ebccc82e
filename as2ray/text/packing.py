"""Packing: token sequences laid end to end with no padding, cut by a token budget.

Knows numpy alone. Must not know tokenizers, models or files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from as2ray.errors import ConfigError


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end; int32, shape [tokens] or [sequences].

    Sequences come sorted by length, longest first, so that equal lengths are adjacent and can be
    attended to as one dense block.
    """

    token_ids: np.ndarray
    """Vocabulary ids, shape [tokens]."""
    token_types: np.ndarray
    """0 for the question and its separators, 1 for the candidate, shape [tokens]."""
    positions: np.ndarray
    """Position of each token in its own sequence, from 0, shape [tokens]."""
    lengths: np.ndarray
    """Tokens of each sequence, shape [sequences]."""
    sequence_data: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What belongs to each sequence (row, label, teacher logits), first axis [sequences]."""
    markers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens that stand for parts of sequences, such as a sentence's marker, shape [marks]."""
    marker_data: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What belongs to each of them, first axis [marks]."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class TokenSequences:
    """Token sequences of any lengths, in any order, end to end as in `PackedBatch`."""

    token_ids: np.ndarray
    token_types: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def pack(self, which: np.ndarray, sequence_data: Mapping[str, np.ndarray]) -> PackedBatch:
        """The sequences `which` as one batch, longest first.

        Args:
            which: Numbers of the sequences, shape [n].
            of_sequence: Arrays over *all* sequences; the batch takes the rows `which`.
        """
        which = which[np.argsort(-self.lengths[which], kind="stable")]
        lengths = self.lengths[which].astype(np.int32)
        starts = (np.cumsum(self.lengths) - self.lengths)[which]
        positions = ragged_arange(lengths)
        source = np.repeat(starts, lengths) + positions
        return PackedBatch(
            token_ids=self.token_ids[source],
            token_types=self.token_types[source],
            positions=positions,
            lengths=lengths,
            sequence_data={name: values[which] for name, values in sequence_data.items()},
        )


def ragged_arange(lengths: np.ndarray) -> np.ndarray:
    """0..n-1 for each n of `lengths`, end to end; int32, shape [sum of lengths]."""
    ends = np.cumsum(lengths)
    whole = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
    inside: np.ndarray = whole - np.repeat((ends - lengths).astype(np.int32), lengths)
    return inside


def split_by_tokens(lengths: np.ndarray, max_batch_tokens: int) -> Iterator[np.ndarray]:
    """Cuts sequences, longest first, into groups of at most `budget` tokens.

    Args:
        lengths: Tokens of each sequence, shape [sequences].
        budget: Most tokens of a group; a longer sequence is refused.

    Yields:
        Numbers of the sequences of a group, longest first.
    """
    order = np.argsort(-lengths, kind="stable")
    if len(order) and lengths[order[0]] > max_batch_tokens:
        raise ConfigError(
            f"a sequence of {lengths[order[0]]:,} tokens for a budget of {max_batch_tokens:,} a batch"
            "; expected a token budget no smaller than the longest sequence",
            fix="raise the token budget or lower max_length",
        )
    start, used = 0, 0
    for end, number in enumerate(order):
        if used + lengths[number] > max_batch_tokens:
            yield order[start:end]
            start, used = end, 0
        used += int(lengths[number])
    if len(order):
        yield order[start:]


def pack_sequences(sequences: TokenSequences, max_batch_tokens: int) -> Iterator[PackedBatch]:
    """All sequences as packed batches of at most `budget` tokens, longest first.

    `of_sequence["row"]` is each one's number.
    """
    rows = {"row": np.arange(len(sequences))}
    for group in split_by_tokens(sequences.lengths, max_batch_tokens):
        yield sequences.pack(group, rows)


def concatenate_sequences(parts: Sequence[TokenSequences]) -> TokenSequences:
    """Several `Sequences` as one, in order."""
    return TokenSequences(
        np.concatenate([p.token_ids for p in parts]),
        np.concatenate([p.token_types for p in parts]),
        np.concatenate([p.lengths for p in parts]),
    )
