"""The epochs of questions: each gives an answer and another candidate, in one packed batch.

Knows contrasts and streams. Must not know models, losses or Ray.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from as2ray.text.contrasts import Contrasts
from as2ray.text.packing import PackedBatch
from as2ray.text.stream import Encoded, Pairs, Stream

PAIR = "pair"
"""What belongs to each sequence: a number that its pair shares."""


@dataclass(frozen=True)
class Couples:
    """Pairs of question and candidate, two by two."""

    pairs: Encoded

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of both together, shape [couples]."""
        lengths: np.ndarray = self.pairs.lengths.reshape(-1, 2).sum(1)
        return lengths

    def pack(self, which: np.ndarray) -> PackedBatch:
        """Both sides of the couples `which` as one batch."""
        return self.pairs.pack((which[:, None] * 2 + np.arange(2)).ravel())

    def placeholder(self) -> PackedBatch:
        """One token that must weigh nothing."""
        return self.pairs.placeholder()


@dataclass(frozen=True)
class PairedStream(Stream):
    """The epochs of the questions of a corpus; a batch counts questions."""

    @property
    def width(self) -> int:
        """Sequences of a question."""
        return 2

    @cached_property
    def contrasts(self) -> Contrasts:
        """The questions that have both kinds of candidates."""
        return Contrasts.find(self.files.paths)

    @property
    def units(self) -> int:
        """What an epoch goes through: questions."""
        return len(self.contrasts)

    def drawn(self, units: np.ndarray, epoch: int, window: int) -> np.ndarray:
        """Row numbers of an answer and another candidate of each question, shape [questions, 2]."""
        return self.contrasts.draw(units, np.random.default_rng([self.seed, epoch, window, 1]))

    def encode(self, rows: np.ndarray) -> Couples:
        """The rows, shape [questions, 2], as tokens, in that order."""
        pairs = super().encode(rows.ravel())
        assert isinstance(pairs, Pairs)
        return Couples(Pairs(pairs.sequences, {**pairs.columns, PAIR: np.arange(rows.size) // 2}))
