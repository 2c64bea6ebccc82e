"""The epochs of questions: each gives a list of its candidates of both kinds, in one packed batch.

Knows contrasts and streams. Must not know models, losses or Ray.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from as2ray.text.contrasts import Contrasts
from as2ray.text.packing import PackedBatch, ragged_arange
from as2ray.text.stream import Encoded, Pairs, Stream

LIST = "list"
"""What belongs to each sequence: a number that its list shares."""


@dataclass(frozen=True)
class Lists:
    """Pairs of question and candidate, list by list."""

    pairs: Encoded
    sizes: np.ndarray
    """Pairs of each list, shape [lists]."""

    @cached_property
    def starts(self) -> np.ndarray:
        """Number of each list's first pair, shape [lists]."""
        starts: np.ndarray = np.cumsum(self.sizes) - self.sizes
        return starts

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each whole list, shape [lists]."""
        return np.add.reduceat(self.pairs.lengths, self.starts)

    def pack(self, which: np.ndarray) -> PackedBatch:
        """The whole lists `which` as one batch."""
        sizes = self.sizes[which]
        return self.pairs.pack(np.repeat(self.starts[which], sizes) + ragged_arange(sizes))

    def placeholder(self) -> PackedBatch:
        """One token that must weigh nothing."""
        return self.pairs.placeholder()


@dataclass(frozen=True)
class ListStream(Stream):
    """The epochs of the questions of a corpus; a batch counts questions."""

    candidates: int = 2
    """Most candidates of a list; two are an answer and another candidate."""

    @property
    def width(self) -> int:
        """Most sequences of a question."""
        return self.candidates

    @cached_property
    def contrasts(self) -> Contrasts:
        """The questions that have both kinds of candidates."""
        return Contrasts.find(self.files.paths)

    @property
    def units(self) -> int:
        """What an epoch goes through: questions."""
        return len(self.contrasts)

    def drawn(self, units: np.ndarray, epoch: int, window: int) -> np.ndarray:
        """Row numbers of each question's list, shape [questions, candidates]; -1 where it has no
        more."""
        random = np.random.default_rng([self.seed, epoch, window, 1])
        return self.contrasts.draw(units, self.candidates, random)

    def encode(self, rows: np.ndarray) -> Lists:
        """The lists, shape [questions, candidates], as tokens, in that order."""
        there = rows >= 0
        pairs = super().encode(rows[there])
        assert isinstance(pairs, Pairs)
        columns = {**pairs.columns, LIST: np.nonzero(there)[0]}
        return Lists(Pairs(pairs.sequences, columns), there.sum(1))
