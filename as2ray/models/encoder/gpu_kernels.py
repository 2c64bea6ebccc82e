"""Triton kernels for inference on NVIDIA GPUs: attention of short sequences, norms, sums of states.

A flash kernel computes blocks of 128 tokens, three times as many as a pair has, and reads a pair's
keys once for each block. Here a program holds a whole sequence's head, in a block of its own size.
"""

# ruff: noqa: ANN001, ANN202 - Triton reads the annotations of kernels

from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from as2ray.models.encoder.length_buckets import LengthBuckets

MAX_SEQUENCE_LENGTH = 128
"""Longest sequence of which a program can hold all products of tokens."""

HEAD_SIZES = (16, 32, 64, 128)
"""Sizes of heads that the kernel of attention computes."""

MIN_BLOCK = 16
"""Fewest rows of a block that tensor cores multiply."""

SUM_ROWS, SUM_COLUMNS = 16, 128
"""States of a sequence that a program of `sum_sequences` reads at once: tokens and their values."""

MAX_LAUNCHES = 4
"""Launches for different lengths of sequences; more would take longer than what they save."""


def short_attention(qkv: Tensor, cu_seqlens: Tensor, buckets: LengthBuckets) -> Tensor:
    """Computes attention inside each sequence of at most `MAX_SEQUENCE_LENGTH` tokens.

    Args:
        qkv: Query, key and value of each token in bf16 or fp16, [tokens, 3, heads, head size].
        cu_seqlens: Index of each sequence's first token, and the number of tokens,
            [sequences + 1].
        buckets: Number of sequences and their length, of each run of adjacent sequences; lengths
            may be upper bounds.

    Returns:
        Shape [tokens, heads * head size]. Rows that belong to no sequence are undefined.
    """
    num_tokens, _, num_heads, head_size = qkv.shape
    output = torch.empty(num_tokens, num_heads * head_size, dtype=qkv.dtype, device=qkv.device)
    for first, count, block in _list_launches(buckets):
        _attention_kernel[num_heads, count](
            qkv,
            output,
            cu_seqlens,
            first,
            head_size**-0.5,
            num_heads,
            head_size=head_size,
            block=block,
            num_warps=4 if block > 32 else 2,
        )
    return output


def _list_launches(buckets: LengthBuckets) -> list[tuple[int, int, int]]:
    """Returns the first sequence, their number and the rows of a block, of each launch."""
    launches, first = [], 0
    for block, group in groupby(buckets, lambda bucket: _block_size(bucket[1])):
        count = sum(number for number, _ in group)
        launches.append((first, count, block))
        first += count
    if len(launches) > MAX_LAUNCHES:  # the sequences are not sorted by length
        return [(0, first, max(block for _, _, block in launches))]
    return launches


def _block_size(length: int) -> int:
    return max(MIN_BLOCK, 1 << (length - 1).bit_length())


@triton.jit
def _attention_kernel(
    qkv,
    output,
    cu_seqlens,
    first_sequence,
    scale,
    num_heads,
    head_size: tl.constexpr,
    block: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = first_sequence + tl.program_id(1)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    rows, columns = tl.arange(0, block), tl.arange(0, head_size)
    is_token = rows < length
    mask = is_token[:, None]
    hidden_size = num_heads * head_size
    inputs = qkv + (start + rows)[:, None] * 3 * hidden_size + head * head_size + columns[None, :]
    query = tl.load(inputs, mask=mask, other=0.0)
    key = tl.load(inputs + hidden_size, mask=mask, other=0.0)
    value = tl.load(inputs + 2 * hidden_size, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(key)) * scale
    scores = tl.where(is_token[None, :], scores, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights /= tl.sum(weights, 1)[:, None]
    attended = tl.dot(weights.to(value.dtype), value)
    target = output + (start + rows)[:, None] * hidden_size + head * head_size + columns[None, :]
    tl.store(target, attended.to(value.dtype), mask=mask)


def sum_sequences(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the sum of the states of each sequence in fp32, [sequences, hidden].

    Args:
        hidden: Contiguous states, [tokens, hidden].
        cu_seqlens: Index of each sequence's first token, and the number of tokens,
            [sequences + 1].
    """
    num_sequences, hidden_size = len(cu_seqlens) - 1, hidden.shape[1]
    output = torch.empty(num_sequences, hidden_size, device=hidden.device)
    blocks = triton.cdiv(hidden_size, SUM_COLUMNS)
    _sum_kernel[num_sequences, blocks](
        hidden, cu_seqlens, output, hidden_size, num_rows=SUM_ROWS, block=SUM_COLUMNS
    )
    return output


@triton.jit
def _sum_kernel(
    hidden, cu_seqlens, output, hidden_size, num_rows: tl.constexpr, block: tl.constexpr
):
    sequence = tl.program_id(0)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    rows = tl.arange(0, num_rows)
    is_column = columns < hidden_size
    total = tl.zeros((block,), tl.float32)
    for first in range(start, end, num_rows):
        mask = (first + rows < end)[:, None] & is_column[None, :]
        states = hidden + (first + rows)[:, None] * hidden_size + columns[None, :]
        total += tl.sum(tl.load(states, mask=mask, other=0.0).to(tl.float32), 0)
    tl.store(output + sequence.to(tl.int64) * hidden_size + columns, total, mask=is_column)


def add_and_norm(x: Tensor, residual: Tensor, weights: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns the layer normalization of `x + residual`, computed in fp32.

    Args:
        x: Contiguous states, [rows, hidden].
        residual: As `x`.
        weights: Weights of the norm, [hidden].
        bias: As `weights`.
        eps: Added to the variance.
    """
    num_rows, hidden_size = x.shape
    output, block = torch.empty_like(x), 1 << (hidden_size - 1).bit_length()
    _add_and_norm_kernel[num_rows,](
        x,
        residual,
        weights,
        bias,
        output,
        hidden_size,
        eps,
        block=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return output


@triton.jit
def _add_and_norm_kernel(x, residual, weights, bias, output, hidden_size, eps, block: tl.constexpr):
    columns = tl.arange(0, block)
    mask = columns < hidden_size
    offset = tl.program_id(0).to(tl.int64) * hidden_size + columns
    total = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / hidden_size
    centered = tl.where(mask, total - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / hidden_size + eps)
    weight = tl.load(weights + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    result = centered * scale * weight + shift
    tl.store(output + offset, result.to(output.dtype.element_ty), mask=mask)
