"""Pooling of packed states to one state for each sequence."""

import torch
from torch import Tensor

from as2ray.models.encoder.packed_attention import SequenceLayout


def mean_pool(hidden: Tensor, layout: SequenceLayout, skip_first: bool = False) -> Tensor:
    """Returns the mean state of each sequence, [sequences, hidden], of states [tokens, hidden].

    Args:
        hidden: States of all tokens.
        layout: Lengths of the sequences.
        skip_first: Whether the first state of each sequence is left out.
    """
    lengths = layout.cu_seqlens.diff()
    sequence_index = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)
    sums = torch.zeros(len(lengths), hidden.shape[1], device=hidden.device)
    sums = sums.index_add(0, sequence_index, hidden.float())
    if skip_first:
        # A rank without work in a step trains on a placeholder of one token.
        rest = (lengths - 1).clamp(min=1)[:, None]
        return (sums - hidden[layout.first_tokens].float()) / rest
    return sums / lengths[:, None]
