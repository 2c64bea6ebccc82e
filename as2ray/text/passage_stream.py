"""The epochs of passages: a row is a passage, what the model reads are its windows.

Knows tables by passages and windows with markers. Must not know models, losses or Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa

from as2ray.text.packing import PackedBatch
from as2ray.text.passages import Windows, encode_passages
from as2ray.text.stream import Stream, placeholder
from as2ray.text.tokens import PairTokenizer

COLUMNS = ("question", "candidate", "label", "passage_label")


@dataclass(frozen=True)
class Passages:
    """Rows that are passages, in one window or several."""

    windows: Windows
    of_window: Mapping[str, np.ndarray]
    """What belongs to each window."""
    of_sentence: Mapping[str, np.ndarray]
    """What belongs to each sentence."""

    @classmethod
    def read(cls, tokenizer: PairTokenizer, passages: pa.Table) -> "Passages":
        """Passages of a table by passages.

        A window of a relevant passage is relevant where it holds a sentence that is, or where the
        whole passage holds none: its fact then lies past its end.
        """
        texts = passages["candidate"].to_pylist()
        windows = encode_passages(tokenizer, passages["question"].to_pylist(), texts)
        label = np.fromiter(chain.from_iterable(passages["label"].to_pylist()), np.float32)
        relevant = passages["passage_label"].to_numpy().astype(np.float32)[windows.passage]
        held = _holds(windows.window, label[windows.sentence], len(windows.sequences))
        held_anywhere = _holds(windows.passage, held, len(texts))[windows.passage]
        relevant = relevant * np.where(held_anywhere > 0, held, 1.0).astype(np.float32)
        return cls(windows, {"passage_label": relevant}, {"label": label})

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all windows of each passage, shape [passages]."""
        return np.bincount(self.windows.passage, self.windows.sequences.lengths).astype(np.int64)

    def pack(self, which: np.ndarray) -> PackedBatch:
        """All windows of the passages `which` as one batch."""
        windows = np.flatnonzero(np.isin(self.windows.passage, which))
        return self.windows.pack(windows, self.of_window, self.of_sentence)

    def placeholder(self) -> PackedBatch:
        """One token that must weigh nothing, a sentence's marker too."""
        batch = self.pack(np.zeros(1, np.int64))
        return placeholder(batch.of_sequence, batch.of_mark)


@dataclass(frozen=True)
class PassageStream(Stream):
    """The epochs of a corpus by passages; a batch counts passages."""

    def encode(self, rows: np.ndarray) -> Passages:
        """The passages `rows` of the corpus as windows, in that order."""
        return Passages.read(self.tokenizer, self.files.read(rows, COLUMNS))


def _holds(group: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """The highest value of each group, at least 0; shape [groups]."""
    highest = np.zeros(groups, np.float32)
    np.maximum.at(highest, group, value)
    return highest
