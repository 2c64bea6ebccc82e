"""Finds the best answer span of a sentence, given logits of its tokens."""

from collections.abc import Iterator

import numpy as np

from as2ray.text.packing import PackedBatch

ScoredSpan = tuple[float, int, int]
"""Score, first token, last token."""

MAX_ANSWER_TOKENS = 30
"""Maximum number of tokens of an answer, as in question answering on SQuAD."""


def best_spans(logits: np.ndarray, batch: PackedBatch) -> Iterator[tuple[int, ScoredSpan]]:
    """Yields the index of every marked sentence with its best span.

    Args:
        logits: Logits of being an answer's first and last token, shape [tokens, 2].
        batch: Packed windows.
    """
    # A sentence ends at the separator of its window or at the marker of the next sentence.
    window_ends = np.cumsum(batch.lengths)[batch.marker_data["window"]] - 1
    next_markers = np.append(batch.markers[1:], batch.num_tokens)
    sentences = batch.marker_data["sentence"].tolist()
    starts, ends = batch.markers + 1, np.minimum(window_ends, next_markers)
    for sentence, start, end in zip(sentences, starts, ends):
        if end <= start:
            continue  # the tokenizer knows no token of this sentence
        scores = logits[start:end, :1] + logits[start:end, 1]
        offsets = np.subtract.outer(np.arange(end - start), np.arange(end - start))  # first - last
        is_span = (offsets <= 0) & (offsets > -MAX_ANSWER_TOKENS)
        scores = np.where(is_span, scores, -np.inf)
        first, last = np.unravel_index(scores.argmax(), scores.shape)
        yield sentence, (float(scores[first, last]), int(first), int(last))
