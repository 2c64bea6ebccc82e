"""Dense attention over runs of sequences of equal length, with its backward pass.

Knows torch tensors. Must not know any architecture.

Without dropout, torch's own fused attention serves, but for short sequences in bf16 on a CPU. With
it, torch falls back to some 25 small operations a run, which on a CPU cost as much as the
products; written out, a run takes 4 forward and 6 backward, and a training step of MiniLM about a
sixth less time.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

LengthBuckets = tuple[tuple[int, int], ...]
"""(sequences, tokens each) of each run of equal lengths."""


MAX_MANUAL_LENGTH = 128
"""Longest sequence whose attention is written out in bf16 on a CPU: three times as fast as torch's
fused kernel there at 40 tokens, twice at 128, slower at 256."""


def bucketed_attention(
    q: Tensor, k: Tensor, v: Tensor, buckets: LengthBuckets, scale: float | None, dropout: float
) -> Tensor:
    """Attention inside each sequence; all tensors [tokens, heads, head size].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        runs: How the tokens fall into sequences.
        scale: Factor on the products; by default 1 / sqrt(head size).
        dropout: Probability of dropping an attention weight.
    """
    if dropout > 0.0:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return _DropoutAttention.apply(q, k, v, buckets, factor, dropout)  # type: ignore[no-any-return, no-untyped-call]
    out = []
    for query, key, value in _split_buckets(buckets, q, k, v):
        short = query.shape[2] <= MAX_MANUAL_LENGTH and not q.is_cuda and q.dtype == torch.bfloat16
        attend = _manual_attention if short else functional.scaled_dot_product_attention
        out.append(attend(query, key, value, scale=scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


def _manual_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention over [sequences, heads, tokens, head size], written out in fp32.

    A product in bf16 is oneDNN's, which compiles and keeps one for every shape it meets, and runs
    of sequences come in ever new shapes; fp32's takes any.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (
        x.to(torch.float32, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    return (q * factor @ k.mT).softmax(-1).matmul(v).to(value.dtype)


def _split_buckets(buckets: LengthBuckets, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each run of the packed tensors as [sequences, heads, tokens, head size]."""
    # One split per tensor: its backward is one concatenation, where slices would each fill zeros.
    sizes = [n * length for n, length in buckets]
    pieces = (x.split(sizes) for x in packed)  # type: ignore[no-untyped-call]
    for (n, length), *parts in zip(buckets, *pieces):
        yield tuple(x.unflatten(0, (n, length)).transpose(1, 2) for x in parts)


def _dropout_masks(buckets: LengthBuckets, like: Tensor, dropout: float) -> Iterator[Tensor]:
    """Random weights 0 or 1 / (1 - dropout), [sequences, heads, tokens, tokens] for each run."""
    heads = like.shape[1]
    sizes = [n * heads * length * length for n, length in buckets]
    mask = _sample_keep_mask(sum(sizes), dropout, like).mul_(1.0 / (1.0 - dropout))
    for (n, length), part in zip(buckets, mask.split(sizes)):  # type: ignore[no-untyped-call]
        yield part.view(n, heads, length, length)


def _sample_keep_mask(size: int, dropout: float, like: Tensor) -> Tensor:
    """1 with probability 1 - dropout, else 0, shape [size]; follows from torch's seed."""
    if like.is_cuda:
        return torch.empty(size, dtype=like.dtype, device=like.device).bernoulli_(1.0 - dropout)
    # torch draws 3 ns a number on one core; 16 bits of numpy's SFC64 take a tenth of it.
    seed = int(torch.randint(2**62, ()))
    bits = np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(2 * size), np.uint16)
    return torch.from_numpy(bits >= int(dropout * 2**16)).to(like.dtype)


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without autocast: the inputs' format holds.

    On a GPU autocast would keep the weights in fp32, and the thread of the backward pass may
    know another autocast than the forward pass had.
    """

    @wraps(method)
    def plain(ctx: Any, first: Tensor, *others: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return method(ctx, first, *others)

    return plain


class _DropoutAttention(torch.autograd.Function):
    """softmax(scale q k') with dropout, times v, run by run."""

    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        buckets: LengthBuckets,
        scale: float,
        dropout: float,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        saved: list[Tensor] = []
        dense = _split_buckets(buckets, q, k, v, out)
        for (query, key, value, target), mask in zip(dense, _dropout_masks(buckets, q, dropout)):
            weights = (query @ key.mT).mul_(scale).softmax(-1)
            target.copy_((weights * mask) @ value)
            saved += [weights, mask]
        ctx.save_for_backward(q, k, v, *saved)
        ctx.runs, ctx.scale = buckets, scale
        return out

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        gradients = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
        dense = _split_buckets(ctx.runs, q, k, v, gradient, *gradients)
        for (query, key, value, given, to_query, to_key, to_value), weights, mask in zip(
            dense, saved[::2], saved[1::2]
        ):
            to_value.copy_((weights * mask).mT @ given)
            to_weights = (given @ value.mT).mul_(mask)
            # d softmax: w (g - sum of w g).
            inner = (weights * to_weights).sum(-1, keepdim=True)
            to_scores = to_weights.sub_(inner).mul_(weights).mul_(ctx.scale)
            to_query.copy_(to_scores @ key)
            to_key.copy_(to_scores.mT @ query)
        return (*gradients, None, None, None)
