"""DeBERTa's attention over packed batches (He et al. 2021, equations 4 and 5).

A score has three parts: query and key; query and the position of the key relative to it; key and
the position of the query relative to it. Positions depend on distances alone, so that one table of
distances serves every length, and sequences of equal length are one dense block. Position keys and
queries are projected once for each layer, and are the right factor of one product for all sequences
of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from as2ray.models.encoder.length_buckets import split_buckets
from as2ray.models.encoder.packed_attention import SequenceLayout


@dataclass(frozen=True)
class PositionProjections:
    """What one layer makes of the embeddings of distances; None of a part that it lacks."""

    keys: Tensor | None
    """Shape [heads, distances, head size], from the last distance to the first."""
    queries: Tensor | None
    """Shape [heads, distances, head size]."""

    @classmethod
    def from_layer(cls, attention: Any, distances: Tensor | None) -> "PositionProjections":
        """Projects the embeddings of distances, [distances, hidden].

        Args:
            attention: A `DisentangledSelfAttention`.
            distances: The embeddings; None for a model without relative attention.
        """
        if distances is None:
            return cls(None, None)
        distances = attention.pos_dropout(distances)
        shared = attention.share_att_key
        key_layer = attention.key_proj if shared else getattr(attention, "pos_key_proj", None)
        query_layer = attention.query_proj if shared else getattr(attention, "pos_query_proj", None)
        parts = []
        for name, layer in (("c2p", key_layer), ("p2c", query_layer)):
            if name in attention.pos_att_type and layer is not None:
                projected = layer(distances).unflatten(-1, (attention.num_attention_heads, -1))
                parts.append(projected.transpose(0, 1))
            else:
                parts.append(None)
        keys, queries = parts
        return cls(None if keys is None else keys.flip(1), queries)


def disentangled_attention(
    attention: Any,
    heads: Sequence[Tensor],
    layout: SequenceLayout,
    positions: PositionProjections,
) -> Tensor:
    """Computes attention inside each sequence of a packed batch, [tokens, hidden].

    On a CPU scores are computed in fp32; see `MAX_MANUAL_LENGTH` for the reason.

    Args:
        attention: A `DisentangledSelfAttention`.
        heads: Query, key and value, each [tokens, heads, head size].
        layout: Positions of the sequences.
        positions: Projections of the distances.
    """
    dtype = heads[2].dtype
    compute_dtype = torch.float32 if heads[0].is_cpu else dtype
    keys, queries = (
        None if part is None else part.to(compute_dtype)
        for part in (positions.keys, positions.queries)
    )
    num_parts = 1 + sum(part in attention.pos_att_type for part in ("c2p", "p2c"))
    scale = (heads[0].shape[-1] * num_parts) ** -0.5
    dropout = attention.dropout.p if attention.training else 0.0
    outputs = []
    for bucket in split_buckets(layout.length_buckets, *heads):
        # [heads, sequences, tokens, head size], so that all sequences share one factor of a head
        query, key, value = (
            x.transpose(0, 1).to(compute_dtype, memory_format=torch.contiguous_format)
            for x in bucket
        )
        num_heads, count, length, _ = query.shape
        scores = query.flatten(0, 1) @ key.flatten(0, 1).mT
        by_distance = (num_heads * count, length, 2 * length - 1)
        if keys is not None:  # column c is the distance j - i = c - length + 1
            rows = _distance_rows(attention, length, query.device, reverse=True)
            products = query.flatten(1, 2) @ keys[:, rows].mT
            scores = scores + _shift(products.view(by_distance))
        if queries is not None:
            rows = _distance_rows(attention, length, query.device)
            products = key.flatten(1, 2) @ queries[:, rows].mT
            scores = scores + _shift(products.view(by_distance)).mT
        weights = functional.dropout((scores * scale).softmax(-1), dropout)
        attended = (weights @ value.flatten(0, 1)).view_as(value)
        outputs.append(attended.permute(1, 2, 0, 3).flatten(0, 1))
    return torch.cat(outputs).flatten(1).to(dtype)


def _distance_rows(
    attention: Any, length: int, device: torch.device, reverse: bool = False
) -> slice | Tensor:
    """Returns the row of each distance i - j in the embeddings, from 1 - length to length - 1.

    Args:
        attention: A `DisentangledSelfAttention`.
        length: Number of tokens.
        device: The device of the states.
        reverse: Return rows of the reversed embeddings, from length - 1 to 1 - length.
    """
    if not attention.relative_attention:
        return torch.zeros(2 * length - 1, dtype=torch.long, device=device)
    size = int(attention.pos_ebd_size)
    has_buckets = attention.position_buckets > 0 and attention.max_relative_positions > 0
    if length <= (attention.position_buckets // 2 if has_buckets else size):
        first = size - length + (0 if reverse else 1)  # a row for each distance: no copy
        return slice(first, first + 2 * length - 1)
    distances = torch.arange(1 - length, length, device=device)
    if has_buckets:
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        distances = make_log_bucket_position(
            distances, attention.position_buckets, attention.max_relative_positions
        ).long()
    rows = (distances + size).clamp(0, 2 * size - 1)
    return 2 * size - 1 - rows.flip(0) if reverse else rows


def _shift(scores: Tensor) -> Tensor:
    """Turns scores by distance, [..., n, 2n - 1], into scores by token, [..., n, n].

    Row i begins at column n - 1 - i, the distance of token 0.
    """
    length = scores.shape[-2]
    if length == 1:
        return scores
    width = 2 * length - 2
    flat = scores.flatten(-2)[..., length - 1 : length - 1 + length * width]
    return flat.reshape(*scores.shape[:-1], width)[..., :length]
