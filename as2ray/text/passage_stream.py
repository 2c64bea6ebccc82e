"""The epochs of passages: a row is a passage, what the model reads are its windows.

Knows tables by passages and windows with markers. Must not know models, losses or Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa

from as2ray.text.packing import PackedBatch
from as2ray.text.passages import Windows, encode_passages
from as2ray.text.spans import NOWHERE, locate
from as2ray.text.stream import Stream, placeholder
from as2ray.text.tokens import PairTokenizer

COLUMNS = ("question", "candidate", "label", "passage_label", "answer")

SPAN = ("answer_first", "answer_last")
"""What belongs to each sentence of where the answer stands in it; -1 where it does not."""


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
        return cls(
            windows, {"passage_label": relevant}, {"label": label, **_spans(tokenizer, passages)}
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all windows of each passage, shape [passages]."""
        return np.bincount(self.windows.passage, self.windows.sequences.lengths).astype(np.int64)

    def pack(self, which: np.ndarray) -> PackedBatch:
        """All windows of the passages `which` as one batch."""
        windows = np.flatnonzero(np.isin(self.windows.passage, which))
        batch = self.windows.pack(windows, self.of_window, self.of_sentence)
        # A span counts from its sentence's first token, which follows the marker; one that the
        # window cuts off is none.
        spans = {name: batch.marks + 1 + batch.of_mark[name] for name in SPAN}
        closing = np.cumsum(batch.lengths)[batch.of_mark["window"]] - 1
        inside = (batch.of_mark[SPAN[0]] >= 0) & (spans[SPAN[1]] < closing)
        places = {name: np.where(inside, place, -1) for name, place in spans.items()}
        return replace(batch, of_mark={**batch.of_mark, **places})

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


def _spans(tokenizer: PairTokenizer, passages: pa.Table) -> dict[str, np.ndarray]:
    """The answer's first and last token in each supporting sentence, shape [sentences] each."""
    rows = zip(*(passages[name].to_pylist() for name in ("answer", "candidate", "label")))
    found = [
        locate(tokenizer, text, answer) if answer and label else NOWHERE
        for answer, texts, labels in rows
        for text, label in zip(texts, labels)
    ]
    return dict(zip(SPAN, np.array(found, np.int64).T))


def _holds(group: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """The highest value of each group, at least 0; shape [groups]."""
    highest = np.zeros(groups, np.float32)
    np.maximum.at(highest, group, value)
    return highest
