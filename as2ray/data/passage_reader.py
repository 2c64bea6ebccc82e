"""Examples that are passages, read in one or several windows with a marker before each sentence."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

import numpy as np
import pyarrow as pa

from as2ray.tables.parquet import ParquetTable
from as2ray.text.answer_spans import NO_SPAN, find_answer_span
from as2ray.text.packing import PackedBatch
from as2ray.text.passage_windows import PassageWindows, encode_passages
from as2ray.text.tokenization import PairTokenizer

COLUMNS = ("question", "candidate", "label", "passage_label", "answer")
SPAN = ("answer_first", "answer_last")
"""Data of each sentence: where the answer stands in it, or -1."""


@dataclass(frozen=True)
class EncodedPassages:
    """Passages as windows of tokens."""

    windows: PassageWindows
    window_data: Mapping[str, np.ndarray]
    sentence_data: Mapping[str, np.ndarray]

    @classmethod
    def read(cls, tokenizer: PairTokenizer, passages: pa.Table) -> "EncodedPassages":
        """Encodes the rows of a table by passages.

        A window of a relevant passage is relevant if it holds a relevant sentence, or if no window
        of the passage does: its fact then lies past the end.
        """
        texts = passages["candidate"].to_pylist()
        windows = encode_passages(tokenizer, passages["question"].to_pylist(), texts)
        label = np.fromiter(chain.from_iterable(passages["label"].to_pylist()), np.float32)
        relevant = passages["passage_label"].to_numpy().astype(np.float32)[windows.window_passage]
        in_window = _max_by(
            windows.marker_window, label[windows.marker_sentence], len(windows.sequences)
        )
        in_passage = _max_by(windows.window_passage, in_window, len(texts))[windows.window_passage]
        relevant = relevant * np.where(in_passage > 0, in_window, 1.0).astype(np.float32)
        rows = zip(*(passages[name].to_pylist() for name in ("answer", "candidate", "label")))
        spans = [
            find_answer_span(tokenizer, text, answer) if answer and label else NO_SPAN
            for answer, sentences, labels in rows
            for text, label in zip(sentences, labels)
        ]
        span_columns = dict(zip(SPAN, np.array(spans, np.int64).T))
        return cls(windows, {"passage_label": relevant}, {"label": label, **span_columns})

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all windows of each passage, shape [passages]."""
        return np.bincount(self.windows.window_passage, self.windows.sequences.lengths).astype(
            np.int64
        )

    def pack(self, which: np.ndarray) -> PackedBatch:
        """All windows of the passages `which` as one batch."""
        windows = np.flatnonzero(np.isin(self.windows.window_passage, which))
        batch = self.windows.pack(windows, self.window_data, self.sentence_data)
        # A span counts from its sentence's first token, which follows the marker.
        spans = {name: batch.markers + 1 + batch.marker_data[name] for name in SPAN}
        closing = np.cumsum(batch.lengths)[batch.marker_data["window"]] - 1
        is_inside = (batch.marker_data[SPAN[0]] >= 0) & (spans[SPAN[1]] < closing)
        spans = {name: np.where(is_inside, place, -1) for name, place in spans.items()}
        return replace(batch, marker_data={**batch.marker_data, **spans})


@dataclass(frozen=True)
class PassageReader:
    """Reads passages from Parquet files."""

    max_sequences: ClassVar[int] = 1
    files: ParquetTable
    tokenizer: PairTokenizer

    @property
    def num_examples(self) -> int:
        """Passages."""
        return len(self.files)

    @property
    def max_tokens(self) -> int:
        """Tokens of a window."""
        return self.tokenizer.max_length

    def sample_rows(self, examples: np.ndarray, seed: list[int]) -> np.ndarray:
        """An example is a row."""
        return examples

    def encode(self, rows: np.ndarray) -> EncodedPassages:
        """The passages as windows, in that order."""
        return EncodedPassages.read(self.tokenizer, self.files.take(rows, COLUMNS))


def _max_by(group: np.ndarray, value: np.ndarray, groups: int) -> np.ndarray:
    """The highest value of each group, at least 0; shape [groups]."""
    highest = np.zeros(groups, np.float32)
    np.maximum.at(highest, group, value)
    return highest
