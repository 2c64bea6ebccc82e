"""Causal attention of sequences whose common prefixes were computed once.

Under a causal mask the states of a prefix do not depend on what follows it. Its keys and values are
kept, as in the cache of a generating decoder, and each sequence attends to them and to itself. Both
parts are softmaxes of their own, which are merged by their maxima and sums (Milakov and Gimelshein
2018, algorithm 3), so that prefixes of other lengths need no padding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

LayerStates = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of a prefix, each [tokens, heads, head size], by index of the layer."""


def split_states(recorded: LayerStates, lengths: Sequence[int]) -> list[LayerStates]:
    """Returns the states of each prefix, of the states of packed prefixes."""
    parts = {
        layer: list(zip(keys.split(lengths), values.split(lengths)))  # type: ignore[no-untyped-call]
        for layer, (keys, values) in recorded.items()
    }
    return [{layer: parts[layer][i] for layer in parts} for i in range(len(lengths))]


def attend_to_prefixes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Any,
    prefix_states: Sequence[tuple[Tensor, Tensor]],
    scale: float | None,
) -> Tensor:
    """Computes causal attention to each sequence's prefix and to itself, in fp32.

    Args:
        q: Shape [tokens, heads, head size].
        k: Shape [tokens, key heads, head size]; each serves as many heads of `q` in turn.
        v: See `k`.
        layout: A `SequenceLayout` with `prefixes`.
        prefix_states: Keys and values of each prefix in this layer.
        scale: Factor of the products; by default 1 / sqrt(head size).

    Returns:
        Shape [tokens, heads, head size].
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    num_tokens, num_heads, size = q.shape
    # [key heads, heads of each, tokens, head size]
    queries = (q.float() * factor).view(num_tokens, k.shape[1], -1, size).permute(1, 2, 0, 3)
    keys, values = (x.float().transpose(0, 1) for x in (k, v))
    merged = torch.empty(queries.shape, device=q.device)
    maxima = merged.new_empty(*queries.shape[:-1], 1)
    sums = torch.empty_like(maxima)
    start = 0
    for count, length in layout.length_buckets:
        tokens = slice(start, start := start + count * length)
        query, key, value = (
            x[..., tokens, :].view(*x.shape[:-2], count, length, size)
            for x in (queries, keys, values)
        )
        scores = query @ key[:, None].mT
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, float("-inf"))
        highest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(highest).exp_()
        merged[:, :, tokens] = (weights @ value[:, None]).flatten(2, 3)
        maxima[:, :, tokens] = highest.flatten(2, 3)
        sums[:, :, tokens] = weights.sum(-1, keepdim=True).flatten(2, 3)
    prefix_of_token = np.repeat(
        layout.prefixes.index, [n for count, n in layout.length_buckets for _ in range(count)]
    )
    for prefix in np.unique(layout.prefixes.index):
        indices = torch.from_numpy(np.flatnonzero(prefix_of_token == prefix)).to(q.device)
        key, value = (x.float().transpose(0, 1) for x in prefix_states[prefix])
        query = queries[:, :, indices]
        scores = torch.bmm(query.flatten(1, 2), key.mT).view(*query.shape[:-1], -1)
        own_highest = maxima[:, :, indices]
        highest = torch.maximum(scores.amax(-1, keepdim=True), own_highest)
        weights, factors = scores.sub_(highest).exp_(), (own_highest - highest).exp_()
        attended = torch.bmm(weights.flatten(1, 2), value).view(query.shape)
        merged[:, :, indices] = merged[:, :, indices] * factors + attended
        sums[:, :, indices] = sums[:, :, indices] * factors + weights.sum(-1, keepdim=True)
    merged.div_(sums)
    return merged.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, size).to(v.dtype)
