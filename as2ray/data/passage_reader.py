"""Reads examples that are passages, each in one or several windows with a marker per sentence."""

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa

from as2ray.data.row_reader import RowReader
from as2ray.text.answer_spans import NO_SPAN, find_answer_span
from as2ray.text.packing import PackedBatch
from as2ray.text.passage_windows import PassageWindows, encode_passages
from as2ray.text.tokenization import PairTokenizer

TABLE_COLUMNS = ("question", "candidate", "label", "passage_label", "answer")

ANSWER_SPAN = ("answer_first", "answer_last")
"""Data of each marker: first and last token of the answer in its sentence, or -1."""


@dataclass(frozen=True)
class EncodedPassages:
    """Tokenized passages."""

    windows: PassageWindows

    @classmethod
    def from_table(cls, tokenizer: PairTokenizer, passages: pa.Table) -> "EncodedPassages":
        """Tokenizes the rows of a table whose rows are passages (`PASSAGE_SCHEMA`).

        A window of a relevant passage is relevant if it contains a relevant sentence. If no window
        of the passage contains one, the relevant sentence was truncated, and all of its windows are
        relevant.
        """
        texts = passages["candidate"].to_pylist()
        windows = encode_passages(tokenizer, passages["question"].to_pylist(), texts)
        label = np.fromiter(chain.from_iterable(passages["label"].to_pylist()), np.float32)
        marker_label = label[windows.marker_sentence]
        window_label = _group_max(windows.marker_window, marker_label, len(windows.sequences))
        best_label = _group_max(windows.window_passage, window_label, len(texts))
        passage_label = passages["passage_label"].to_numpy()[windows.window_passage]
        has_relevant_window = best_label[windows.window_passage] > 0
        relevant = passage_label * np.where(has_relevant_window, window_label, 1.0)
        spans = [
            find_answer_span(tokenizer, text, row["answer"]) if row["answer"] and label else NO_SPAN
            for row in passages.to_pylist()
            for text, label in zip(row["candidate"], row["label"])
        ]
        sentence_data = {"label": label, **dict(zip(ANSWER_SPAN, np.array(spans).T))}
        window_data = {"passage_label": relevant.astype(np.float32)}
        return cls(replace(windows, window_data=window_data, sentence_data=sentence_data))

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of all windows of each passage, shape [passages]."""
        lengths = np.bincount(self.windows.window_passage, self.windows.sequences.lengths)
        return lengths.astype(np.int64)

    def pack(self, indices: np.ndarray) -> PackedBatch:
        """Packs all windows of the selected passages into one batch."""
        is_selected = np.isin(self.windows.window_passage, indices)
        batch = self.windows.pack(np.flatnonzero(is_selected))
        # A span counts from the first token of its sentence, which follows the marker.
        spans = {name: batch.markers + 1 + batch.marker_data[name] for name in ANSWER_SPAN}
        last_token = np.cumsum(batch.lengths)[batch.marker_data["window"]] - 1
        first, last = ANSWER_SPAN
        is_inside = (batch.marker_data[first] >= 0) & (spans[last] < last_token)
        spans = {name: np.where(is_inside, token, -1) for name, token in spans.items()}
        return replace(batch, marker_data={**batch.marker_data, **spans})


@dataclass(frozen=True)
class PassageReader(RowReader):
    """Reads passages from Parquet files.

    `max_tokens` bounds a window; a passage of several windows is larger.
    """

    def encode(self, rows: np.ndarray) -> EncodedPassages:
        """Reads and tokenizes passages, in order."""
        return EncodedPassages.from_table(self.tokenizer, self.files.take(rows, TABLE_COLUMNS))


def _group_max(groups: np.ndarray, values: np.ndarray, num_groups: int) -> np.ndarray:
    """Returns the highest value of each group, at least 0; shape [groups]."""
    highest = np.zeros(num_groups, np.float32)
    np.maximum.at(highest, groups, values)
    return highest
