"""Packs token sequences end to end without padding, in batches of a token budget."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from as2ray.errors import ConfigError


@dataclass(frozen=True)
class Prefixes:
    """The tokens that sequences begin with and share, as those of one question do in a prompt."""

    index: np.ndarray
    """Index of each sequence's prefix, shape [sequences]."""
    lengths: np.ndarray
    """Number of tokens of each prefix, shape [prefixes]."""
    states: Any = None
    """What a model has computed of each prefix; None while the sequences contain them."""

    def select(self, indices: np.ndarray) -> "Prefixes":
        """Returns the prefixes of some of the sequences."""
        return replace(self, index=self.index[indices])


@dataclass(frozen=True)
class PackedBatch:
    """A batch of token sequences, end to end without padding.

    Sequences are sorted by length, longest first, so that equal lengths are adjacent and attention
    can treat them as one dense block. Arrays over tokens and sequences are int32.
    """

    token_ids: np.ndarray
    """Vocabulary ids, shape [tokens]."""
    token_types: np.ndarray
    """0 for the question and its separators, 1 for the candidate, shape [tokens]."""
    positions: np.ndarray
    """Position of each token in its sequence, from 0 or behind its prefix, shape [tokens]."""
    lengths: np.ndarray
    """Number of tokens of each sequence, shape [sequences]."""
    sequence_data: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Data of each sequence (row, label, teacher logits), first axis [sequences]."""
    markers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Indices of tokens that represent parts of sequences, such as sentences, shape [markers]."""
    marker_data: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Data of each marker, first axis [markers]."""
    prefixes: Prefixes | None = None
    """What the sequences continue, if it was computed apart."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class TokenSequences:
    """Token sequences end to end, in any order; the arrays are as in `PackedBatch`."""

    token_ids: np.ndarray
    token_types: np.ndarray
    lengths: np.ndarray
    prefixes: Prefixes | None = None
    """What sequences of the same question share; None if that is nothing or is not known."""

    def __len__(self) -> int:
        return len(self.lengths)

    def continued_prefixes(self, indices: np.ndarray) -> Prefixes | None:
        """Returns what some sequences continue; None if they are whole."""
        is_whole = self.prefixes is None or self.prefixes.states is None
        return None if is_whole else self.prefixes.select(indices)  # type: ignore[union-attr]

    def take(self, indices: np.ndarray) -> "TokenSequences":
        """Returns some sequences, in this order."""
        batch = self._gather(indices)
        prefixes = None if self.prefixes is None else self.prefixes.select(indices)
        return TokenSequences(*batch, self.lengths[indices], prefixes)

    def split_prefixes(self) -> "tuple[TokenSequences, TokenSequences]":
        """Returns each prefix once, and what follows it in each sequence."""
        assert self.prefixes is not None
        index, lengths = self.prefixes.index, self.prefixes.lengths
        _, examples = np.unique(index, return_index=True)
        starts = np.cumsum(self.lengths) - self.lengths
        is_prefix = ragged_arange(self.lengths) < np.repeat(lengths[index], self.lengths)
        source = np.repeat(starts[examples], lengths) + ragged_arange(lengths)
        parts = ((x[source], x[~is_prefix]) for x in (self.token_ids, self.token_types))
        (prefix_ids, ids), (prefix_types, types) = parts
        rest = (self.lengths - lengths[index]).astype(np.int32)
        return (
            TokenSequences(prefix_ids, prefix_types, lengths.astype(np.int32)),
            TokenSequences(ids, types, rest, self.prefixes),
        )

    def _gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.lengths[indices]
        starts = (np.cumsum(self.lengths) - self.lengths)[indices]
        source = np.repeat(starts, lengths) + ragged_arange(lengths)
        return self.token_ids[source], self.token_types[source]

    def pack(self, indices: np.ndarray, sequence_data: Mapping[str, np.ndarray]) -> PackedBatch:
        """Packs the selected sequences into one batch, longest first.

        Args:
            indices: Indices of the sequences, shape [n].
            sequence_data: Arrays over *all* sequences; the batch gets the rows of `indices`.
        """
        indices = indices[np.argsort(-self.lengths[indices], kind="stable")]
        lengths = self.lengths[indices].astype(np.int32)
        positions, prefixes = ragged_arange(lengths), self.continued_prefixes(indices)
        if prefixes is not None:
            positions = positions + np.repeat(prefixes.lengths[prefixes.index], lengths)
        data = {name: values[indices] for name, values in sequence_data.items()}
        return PackedBatch(*self._gather(indices), positions, lengths, data, prefixes=prefixes)


def ragged_arange(lengths: np.ndarray) -> np.ndarray:
    """Returns 0..n-1 for each n of `lengths`, end to end; int32, shape [sum of lengths]."""
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
    ragged: np.ndarray = positions - np.repeat((ends - lengths).astype(np.int32), lengths)
    return ragged


def split_by_tokens(lengths: np.ndarray, max_batch_tokens: int) -> Iterator[np.ndarray]:
    """Splits sequences into groups of at most `max_batch_tokens` tokens, longest first.

    Args:
        lengths: Number of tokens of each sequence, shape [sequences].
        max_batch_tokens: Maximum number of tokens of a group.

    Yields:
        Indices of the sequences of a group, longest first.

    Raises:
        ConfigError: A sequence is longer than `max_batch_tokens`.
    """
    order = np.argsort(-lengths, kind="stable")
    if np.any(lengths > max_batch_tokens):
        raise ConfigError(
            f"a sequence of {lengths.max():,} tokens does not fit a batch of {max_batch_tokens:,}",
            fix="raise the token budget or lower max_length",
        )
    ends = np.cumsum(lengths[order], dtype=np.int64)
    start = 0
    while start < len(order):
        limit = max_batch_tokens + (ends[start - 1] if start else 0)
        end = int(np.searchsorted(ends, limit, side="right"))
        yield order[start:end]
        start = end


def pack_sequences(sequences: TokenSequences, max_batch_tokens: int) -> Iterator[PackedBatch]:
    """Packs all sequences into batches of at most `max_batch_tokens` tokens, longest first.

    `sequence_data["row"]` of a batch holds the index of each sequence.
    """
    rows = {"row": np.arange(len(sequences))}
    for group in split_by_tokens(sequences.lengths, max_batch_tokens):
        yield sequences.pack(group, rows)


def concatenate_sequences(parts: Sequence[TokenSequences]) -> TokenSequences:
    """Joins several `TokenSequences` in order."""
    return TokenSequences(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.token_types for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        _concatenate_prefixes([part.prefixes for part in parts]),
    )


def _concatenate_prefixes(parts: Sequence[Prefixes | None]) -> Prefixes | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    lengths = np.concatenate([part.lengths for part in known])
    offsets = np.cumsum([0, *(len(part.lengths) for part in known)])
    index = np.concatenate([part.index + offset for part, offset in zip(known, offsets)])
    return Prefixes(index, lengths)
