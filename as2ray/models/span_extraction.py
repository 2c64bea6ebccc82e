"""The best answer span of a sentence, from logits of its tokens.

Knows packed windows with markers. Must not know networks.
"""

from collections.abc import Iterator

import numpy as np

from as2ray.text.packing import PackedBatch

ScoredSpan = tuple[float, int, int]
"""Score, first token, last token."""

MAX_ANSWER_TOKENS = 30
"""Most tokens of an answer, as in question answering on SQuAD."""


def best_spans(logits: np.ndarray, batch: PackedBatch) -> Iterator[tuple[int, ScoredSpan]]:
    """The best span of every marked sentence: its number, and (score, first, last token in it).

    Args:
        logits: Of being an answer's first and last token, shape [tokens, 2].
        batch: Packed windows.
    """
    closing = np.cumsum(batch.lengths)[batch.marker_data["window"]] - 1
    following = np.append(batch.markers[1:], batch.num_tokens)
    for number, begin, end in zip(
        batch.marker_data["sentence"].tolist(), batch.markers + 1, np.minimum(closing, following)
    ):
        if end <= begin:
            continue  # a sentence of no token that the tokenizer knows
        both = logits[begin:end, :1] + logits[begin:end, 1]
        ahead = np.subtract.outer(np.arange(end - begin), np.arange(end - begin))
        both = np.where((ahead <= 0) & (ahead > -MAX_ANSWER_TOKENS), both, -np.inf)
        first, last = np.unravel_index(both.argmax(), both.shape)
        yield number, (float(both[first, last]), int(first), int(last))
