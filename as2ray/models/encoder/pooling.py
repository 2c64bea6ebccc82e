"""Pooling of packed states to one state for each sequence."""

import torch
from torch import Tensor
from torch.nn import functional

from as2ray.models.encoder.packed_attention import SequenceLayout


def mean_pool(hidden: Tensor, layout: SequenceLayout, skip_first: bool = False) -> Tensor:
    """Returns the mean state of each sequence, [sequences, hidden], of states [tokens, hidden].

    Args:
        hidden: States of all tokens.
        layout: Lengths of the sequences.
        skip_first: Whether the first state of each sequence is left out.
    """
    lengths = layout.cu_seqlens.diff()
    # `index_add` on a GPU would add the states of a sequence one after the other, each with a lock.
    tokens = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
    sums = functional.embedding_bag(tokens, hidden.float(), layout.first_tokens, mode="sum")
    if skip_first:
        # A rank without work in a step trains on a placeholder of one token.
        rest = (lengths - 1).clamp(min=1)[:, None]
        return (sums - hidden[layout.first_tokens].float()) / rest
    return sums / lengths[:, None]
