"""Packed attention: every sequence of a packed batch attends to itself alone.

Knows torch and the attention interface of transformers. Must not know any architecture.

Registered with transformers' `AttentionInterface`, one function serves BERT, RoBERTa, ELECTRA and
ALBERT as they are. On a GPU it is one variable-length kernel; elsewhere it is dense attention over
runs of sequences of equal length, which a packed batch keeps adjacent: no mask and no padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from as2ray.models.encoder.length_buckets import LengthBuckets, bucketed_attention

ATTENTION_IMPLEMENTATION = "as2ray_packed"


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of a packed batch lie."""

    length_buckets: LengthBuckets
    """(sequences, tokens each) of each run of equal lengths."""
    cu_seqlens: Tensor
    """First token of each sequence and the end, int32, shape [sequences + 1]."""
    max_seqlen: int
    """Tokens of the longest sequence."""

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | np.ndarray, device: torch.device
    ) -> "SequenceLayout":
        """Layout of sequences of these lengths, in order; shape [sequences]."""
        sizes = np.asarray(lengths)
        starts = np.flatnonzero(np.diff(sizes, prepend=-1))
        counts = np.diff(np.append(starts, len(sizes)))
        runs = tuple((int(n), int(sizes[s])) for n, s in zip(counts, starts))
        bounds = torch.from_numpy(np.append(0, np.cumsum(sizes)).astype(np.int32))
        return cls(runs, bounds.to(device), int(sizes.max()))

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(n * length for n, length in self.length_buckets)

    @property
    def first_tokens(self) -> Tensor:
        """Index of each sequence's first token, shape [sequences]."""
        return self.cu_seqlens[:-1]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: SequenceLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention inside each sequence of a packed batch.

    Args:
        module: The calling layer; not used.
        query: Shape [1, heads, tokens, head size]; `key` and `value` alike.
        key: See `query`.
        value: See `query`.
        attention_mask: Not used: packing leaves nothing to mask.
        layout: Where the sequences lie.
        scaling: Factor on the products; by default 1 / sqrt(head size).
        dropout: Probability of dropping an attention weight.

    Returns:
        Shape [1, tokens, heads, head size], and no weights.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # The variable-length kernel has neither dropout nor fp32.
    if query.is_cuda and dropout == 0.0 and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen_attention(q, k, v, layout, scaling)[None], None
    return bucketed_attention(q, k, v, layout.length_buckets, scaling, dropout)[None], None


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest, bounds = layout.max_seqlen, layout.cu_seqlens
    return cast(Tensor, varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling))


AttentionInterface.register(ATTENTION_IMPLEMENTATION, packed_attention)
