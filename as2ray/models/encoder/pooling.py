"""Pooling of packed states to one state for each sequence."""

import torch
from torch import Tensor
from torch.nn import functional

from as2ray.models.encoder.fused_layers import has_triton
from as2ray.models.encoder.packed_attention import SequenceLayout


def mean_pool(hidden: Tensor, layout: SequenceLayout, skip_first: bool = False) -> Tensor:
    """Returns the mean state of each sequence, [sequences, hidden], of states [tokens, hidden].

    Args:
        hidden: States of all tokens.
        layout: Lengths of the sequences.
        skip_first: Whether the first state of each sequence is left out.
    """
    lengths, sums = layout.cu_seqlens.diff(), _sum_sequences(hidden, layout)
    if skip_first:
        # A rank without work in a step trains on a placeholder of one token.
        rest = (lengths - 1).clamp(min=1)[:, None]
        return (sums - hidden[layout.first_tokens].float()) / rest
    return sums / lengths[:, None]


def _sum_sequences(hidden: Tensor, layout: SequenceLayout) -> Tensor:
    if hidden.is_cuda and has_triton() and not torch.is_grad_enabled():
        from as2ray.models.encoder.gpu_kernels import sum_sequences

        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
            return sum_sequences(hidden.contiguous(), layout.cu_seqlens)
    # `index_add` on a GPU would add the states of a sequence one after the other, each with a lock.
    tokens = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
    return functional.embedding_bag(tokens, hidden.float(), layout.first_tokens, mode="sum")
