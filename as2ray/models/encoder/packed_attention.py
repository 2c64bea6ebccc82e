"""Attention over packed batches: every sequence attends to itself only.

One function, registered with transformers' `AttentionInterface`, works for BERT, RoBERTa, ELECTRA
and ALBERT unchanged. On a GPU it is one variable-length kernel. Elsewhere it is dense attention
over buckets of sequences of equal length, which are adjacent in a packed batch: no mask and no
padding.
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
    """Positions of the sequences in a packed batch."""

    length_buckets: LengthBuckets
    """Runs of adjacent sequences of equal length."""
    cu_seqlens: Tensor
    """Index of each sequence's first token, and the number of tokens; int32, [sequences + 1]."""
    max_seqlen: int
    """Number of tokens of the longest sequence."""

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | np.ndarray, device: torch.device
    ) -> "SequenceLayout":
        """Creates the layout of sequences of these lengths, in order; shape [sequences]."""
        lengths = np.asarray(lengths)
        starts = np.flatnonzero(np.diff(lengths, prepend=-1))
        counts = np.diff(np.append(starts, len(lengths)))
        buckets = tuple((int(n), int(length)) for n, length in zip(counts, lengths[starts]))
        cu_seqlens = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
        return cls(buckets, cu_seqlens.to(device), int(lengths.max()))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(count * length for count, length in self.length_buckets)

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
    max_manual_length: int = 0,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes attention inside each sequence of a packed batch.

    Args:
        module: The calling layer; not used.
        query: Shape [1, heads, tokens, head size]; `key` and `value` alike.
        key: See `query`.
        value: See `query`.
        attention_mask: Not used, because packed batches have no padding.
        layout: Positions of the sequences.
        scaling: Factor of the products; by default 1 / sqrt(head size).
        dropout: Probability of dropping an attention weight.
        max_manual_length: See `bucketed_attention`.

    Returns:
        Shape [1, tokens, heads, head size], and None instead of attention weights.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # The variable-length kernel has neither dropout nor fp32.
    if query.is_cuda and dropout == 0.0 and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen_attention(q, k, v, layout, scaling)[None], None
    attended = bucketed_attention(
        q, k, v, layout.length_buckets, scaling, dropout, max_manual_length
    )
    return attended[None], None


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, max_seqlen = layout.cu_seqlens, layout.max_seqlen
    output = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scaling)
    return cast(Tensor, output)


AttentionInterface.register(ATTENTION_IMPLEMENTATION, packed_attention)
