"""Dense attention over buckets of sequences of equal length, with its own backward pass.

Without dropout, torch's fused attention is used, except for short sequences in bf16 on a CPU. With
dropout, torch falls back to some 25 small operations per bucket, which cost as much on a CPU as the
products. Written by hand, a bucket takes 4 operations forward and 6 backward, and a training step
of MiniLM takes about a sixth less time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

LengthBuckets = tuple[tuple[int, int], ...]
"""(number of sequences, tokens of each) of each run of adjacent sequences of equal length."""

MAX_MANUAL_LENGTH = 128
"""Longest sequence for which attention in bf16 on a CPU is computed by hand. It is three times as
fast as torch's fused kernel at 40 tokens, twice at 128, and slower at 256."""


@dataclass(frozen=True)
class AttentionMask:
    """Which tokens of a sequence a token attends to, besides itself."""

    is_causal: bool = False
    """Only those before it."""
    sliding_window: int | None = None
    """Only those at a distance below this."""

    @property
    def window_size(self) -> tuple[int, int]:
        """Number of tokens before and after a token that it attends to; -1 for all."""
        reach = -1 if self.sliding_window is None else self.sliding_window - 1
        return reach, 0 if self.is_causal else reach

    def for_length(self, length: int, device: torch.device) -> Tensor | None:
        """Returns where attention is allowed, [length, length], or None if everywhere."""
        has_window = self.sliding_window is not None and length > self.sliding_window
        if not has_window and not (self.is_causal and length > 1):
            return None
        allowed = torch.ones(length, length, dtype=torch.bool, device=device)
        reach = length if self.sliding_window is None else self.sliding_window - 1
        allowed = allowed.triu(-reach)
        return allowed.tril(0 if self.is_causal else reach)


UNMASKED = AttentionMask()


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buckets: LengthBuckets,
    scale: float | None,
    dropout: float,
    mask: AttentionMask = UNMASKED,
) -> Tensor:
    """Computes attention inside each sequence; all tensors have [tokens, heads, head size].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        buckets: The sequences that the tokens belong to.
        scale: Factor of the products; by default 1 / sqrt(head size).
        dropout: Probability of dropping an attention weight.
        mask: Which tokens of its sequence a token attends to.
    """
    if dropout > 0.0:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return _DropoutAttention.apply(q, k, v, buckets, factor, dropout, mask)  # type: ignore[no-any-return, no-untyped-call]
    outputs = []
    max_manual_length = MAX_MANUAL_LENGTH if q.dtype == torch.bfloat16 and not q.is_cuda else 0
    for query, key, value in split_buckets(buckets, q, k, v):
        use_manual = query.shape[2] <= max_manual_length
        attend = _manual_attention if use_manual else functional.scaled_dot_product_attention
        allowed = mask.for_length(query.shape[2], q.device)
        attended = attend(query, key, value, attn_mask=allowed, scale=scale)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _manual_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Computes attention over [sequences, heads, tokens, head size] in fp32.

    In bf16, oneDNN would compile and keep a kernel for every shape, and buckets have ever new
    shapes. In fp32, one kernel takes all shapes.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (
        x.to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)
        for x in (query, key, value)
    )
    scores = torch.baddbmm(q.new_empty(1), q, k.mT, beta=0.0, alpha=factor)
    if attn_mask is not None:
        scores = scores.masked_fill_(~attn_mask, float("-inf"))
    return torch.bmm(scores.softmax(-1), v).view(query.shape).to(value.dtype)


def bucketed_self_attention(
    qkv: Tensor,
    buckets: LengthBuckets,
    num_rows: int,
    dtype: torch.dtype,
    first_queries: bool = False,
    mask: AttentionMask = UNMASKED,
    scale: float | None = None,
) -> Tensor:
    """Computes attention inside each sequence, in fp32 on a CPU, for inference.

    Query, key and value of a bucket are copied and converted at once, and the results are written
    where they belong, which takes half the time of `bucketed_attention` besides its products.

    Args:
        qkv: Query, key and value of each token, shape [tokens, 3, heads, head size].
        buckets: The sequences that the tokens belong to.
        num_rows: Number of rows of the result; those after the last query are zeros.
        dtype: Number format of the result.
        first_queries: Whether only the first token of each sequence attends.
        mask: Which tokens of its sequence a token attends to.
        scale: Factor of the products; by default 1 / sqrt(head size).

    Returns:
        Shape [rows, heads * head size].
    """
    num_heads, head_size = qkv.shape[2:]
    factor = head_size**-0.5 if scale is None else scale
    output = torch.empty(num_rows, num_heads, head_size, dtype=dtype)
    start = first_token = 0
    for count, length in buckets:
        part = qkv[first_token : first_token + count * length]
        first_token += count * length
        states = part.view(count, length, 3, num_heads, head_size).permute(2, 0, 3, 1, 4)
        num_queries = 1 if first_queries else length
        allowed = mask.for_length(length, qkv.device)
        allowed = None if allowed is None else allowed[:num_queries]
        if length > MAX_MANUAL_LENGTH:
            query, key, value = states
            attended = functional.scaled_dot_product_attention(
                query[:, :, :num_queries], key, value, attn_mask=allowed, scale=factor
            )
        else:
            query, key, value = states.float().contiguous().flatten(1, 2)
            scores = torch.baddbmm(
                query.new_empty(1),
                query[:, :num_queries],
                key.mT,
                beta=0.0,
                alpha=factor,
            )
            if allowed is not None:
                scores.masked_fill_(~allowed, float("-inf"))
            attended = torch.bmm(scores.softmax(-1), value)
            attended = attended.view(count, num_heads, num_queries, head_size)
        end = start + count * num_queries
        rows = output[start:end].view(count, num_queries, num_heads, head_size)
        rows.copy_(attended.transpose(1, 2))
        start = end
    output[start:].zero_()
    return output.flatten(1)


def split_buckets(buckets: LengthBuckets, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the packed tensors of each bucket as [sequences, heads, tokens, head size]."""
    # The backward of a split is one concatenation; that of slices would fill zeros for each slice.
    sizes = [count * length for count, length in buckets]
    split_tensors = (x.split(sizes) for x in packed)  # type: ignore[no-untyped-call]
    for (count, length), *tensors in zip(buckets, *split_tensors):
        yield tuple(x.unflatten(0, (count, length)).transpose(1, 2) for x in tensors)


def _dropout_masks(buckets: LengthBuckets, like: Tensor, dropout: float) -> Iterator[Tensor]:
    """Yields random factors 0 or 1 / (1 - dropout), [sequences, heads, tokens, tokens]."""
    num_heads = like.shape[1]
    sizes = [count * num_heads * length * length for count, length in buckets]
    mask = _sample_keep_mask(sum(sizes), dropout, like).mul_(1.0 / (1.0 - dropout))
    for (count, length), part in zip(buckets, mask.split(sizes)):  # type: ignore[no-untyped-call]
        yield part.view(count, num_heads, length, length)


def _sample_keep_mask(size: int, dropout: float, like: Tensor) -> Tensor:
    """Returns 1 with probability 1 - dropout, else 0, shape [size]; depends on torch's seed."""
    if like.is_cuda:
        return torch.empty(size, dtype=like.dtype, device=like.device).bernoulli_(1.0 - dropout)
    # torch takes 3 ns per number on one core; 16 bits of numpy's SFC64 take a tenth of that.
    seed = int(torch.randint(2**62, ()))
    bits = np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(2 * size), np.uint16)
    return torch.from_numpy(bits >= int(dropout * 2**16)).to(like.dtype)


def _without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Disables autocast in a method, so that the dtype of its inputs is used.

    On a GPU, autocast would keep the attention weights in fp32, and the thread of the backward pass
    may have another autocast state than the forward pass.
    """

    @wraps(method)
    def wrapper(ctx: Any, tensor: Tensor, *args: Any) -> Any:
        with torch.autocast(tensor.device.type, enabled=False):
            return method(ctx, tensor, *args)

    return wrapper


class _DropoutAttention(torch.autograd.Function):
    """Computes dropout(softmax(scale * q k')) v for each bucket."""

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
        mask: AttentionMask,
    ) -> Tensor:
        output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        saved: list[Tensor] = []
        tensors = split_buckets(buckets, q, k, v, output)
        dropout_masks = _dropout_masks(buckets, q, dropout)
        for (query, key, value, target), dropout_mask in zip(tensors, dropout_masks):
            scores = (query @ key.mT).mul_(scale)
            allowed = mask.for_length(query.shape[2], q.device)
            if allowed is not None:
                scores.masked_fill_(~allowed, float("-inf"))
            weights = scores.softmax(-1)
            target.copy_((weights * dropout_mask) @ value)
            saved += [weights, dropout_mask]
        ctx.save_for_backward(q, k, v, *saved)
        ctx.buckets, ctx.scale = buckets, scale
        return output

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        gradients = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
        tensors = split_buckets(ctx.buckets, q, k, v, gradient, *gradients)
        for (
            query,
            key,
            value,
            grad,
            query_grad,
            key_grad,
            value_grad,
        ), weights, dropout_mask in zip(tensors, saved[::2], saved[1::2]):
            value_grad.copy_((weights * dropout_mask).mT @ grad)
            weights_grad = (grad @ value.mT).mul_(dropout_mask)
            # The gradient of softmax is w * (g - sum(w * g)).
            weighted_sum = (weights * weights_grad).sum(-1, keepdim=True)
            scores_grad = weights_grad.sub_(weighted_sum).mul_(weights).mul_(ctx.scale)
            query_grad.copy_(scores_grad @ key)
            key_grad.copy_(scores_grad.mT @ query)
        return (*gradients, None, None, None, None)
