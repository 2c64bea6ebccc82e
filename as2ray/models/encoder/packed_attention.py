"""Attention over packed batches: every sequence attends to itself only.

One function, registered with transformers' `AttentionInterface`, works for every family but
DeBERTa. On a GPU it is one variable-length kernel. Elsewhere it is dense attention over buckets of
sequences of equal length, which are adjacent in a packed batch: no padding, and no mask but those
of windows and causality.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from as2ray.errors import CheckpointError
from as2ray.models.encoder.length_buckets import (
    UNMASKED,
    AttentionMask,
    LengthBuckets,
    bucketed_attention,
)
from as2ray.models.encoder.shared_prefixes import LayerStates, attend_to_prefixes
from as2ray.text.packing import Prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_IMPLEMENTATION = "as2ray_packed"

IGNORED_ARGUMENTS = frozenset({"deterministic", "use_cache"})
"""Arguments of layers that change no result here: ModernBERT's choice of a kernel, and whether a
decoder keeps its keys and values."""


@dataclass(frozen=True)
class SequenceLayout:
    """Positions of the sequences in a packed batch."""

    length_buckets: LengthBuckets
    """Runs of adjacent sequences of equal length."""
    cu_seqlens: Tensor
    """Index of each sequence's first token, and the number of tokens; int32, [sequences + 1]."""
    max_seqlen: int
    """Number of tokens of the longest sequence."""
    prefixes: Prefixes | None = None
    """What the sequences continue, with `states`; None if they are whole."""
    recorded: LayerStates | None = None
    """Keeps the keys and values of each layer, if they are to be continued."""

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | np.ndarray,
        device: torch.device,
        prefixes: Prefixes | None = None,
    ) -> "SequenceLayout":
        """Creates the layout of sequences.

        Args:
            lengths: Number of tokens of each, in order, shape [sequences].
            device: The device of the states.
            prefixes: What they continue, if their prefixes were computed apart.
        """
        lengths = np.asarray(lengths)
        starts = np.flatnonzero(np.diff(lengths, prepend=-1))
        counts = np.diff(np.append(starts, len(lengths)))
        buckets = tuple((int(n), int(length)) for n, length in zip(counts, lengths[starts]))
        cu_seqlens = copy_to_device(np.append(0, np.cumsum(lengths)).astype(np.int32), device)
        return cls(buckets, cu_seqlens, int(lengths.max()), prefixes)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(count * length for count, length in self.length_buckets)

    @property
    def first_tokens(self) -> Tensor:
        """Index of each sequence's first token, shape [sequences]."""
        return self.cu_seqlens[:-1]

    @property
    def last_tokens(self) -> Tensor:
        """Index of each sequence's last token, shape [sequences]."""
        return self.cu_seqlens[1:] - 1

    def are_first_tokens(self, token_index: Tensor) -> bool:
        """Returns whether these are all sequences' first tokens, and after them only zeros."""
        first_tokens, padding = token_index.tensor_split([len(self.first_tokens)])
        return torch.equal(first_tokens.int(), self.first_tokens) and not bool(padding.any())

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, from 0 or behind its prefix, shape [tokens]."""
        device = self.cu_seqlens.device
        parts = [
            torch.arange(length, device=device).repeat(count)
            for count, length in self.length_buckets
        ]
        positions = torch.cat(parts)
        if self.prefixes is None:
            return positions
        starts = torch.from_numpy(self.prefixes.lengths[self.prefixes.index]).to(device)
        return positions + starts.repeat_interleave(self.cu_seqlens.diff())


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns a tensor on a device; the copy does not wait for what a GPU still computes."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def take_ranges(states: Tensor, starts: np.ndarray, lengths: np.ndarray) -> Tensor:
    """Returns ranges of rows, end to end. The indices of rows are made on the states' device.

    Args:
        states: Shape [rows, hidden].
        starts: First row of each range, shape [ranges].
        lengths: Number of rows of each range, shape [ranges].
    """
    num_rows = int(lengths.sum())
    offsets = starts - (np.cumsum(lengths) - lengths)
    ranges = copy_to_device(np.stack([offsets, lengths]).astype(np.int32), states.device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=states.device)
    rows += ranges[0].repeat_interleave(ranges[1], output_size=num_rows)
    return states.index_select(0, rows)


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
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention inside each sequence of a packed batch.

    Args:
        module: The calling layer; it may say `is_causal`.
        query: Shape [1, heads, tokens, head size]; `key` and `value` alike, but each of their heads
            may serve several heads of the query.
        key: See `query`.
        value: See `query`.
        attention_mask: Must be None, because packed batches have no padding.
        layout: Positions of the sequences.
        scaling: Factor of the products; by default 1 / sqrt(head size).
        dropout: Probability of dropping an attention weight.
        sliding_window: Tokens i and j attend to each other only if |i - j| is below it.
        is_causal: Whether a token attends only to those before it; by default as the module says.
        others: Further arguments, of which only `IGNORED_ARGUMENTS` are allowed.

    Returns:
        Shape [1, tokens, heads, head size], and None instead of attention weights.

    Raises:
        CheckpointError: Another argument, or a mask.
    """
    unknown = sorted(name for name in others.keys() - IGNORED_ARGUMENTS if others[name] is not None)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise CheckpointError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown)}, which packed "
            "attention does not compute"
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    mask = AttentionMask(is_causal, sliding_window)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k = q.to(v.dtype), k.to(v.dtype)  # rotation may have returned fp32
    if layout.recorded is not None:
        layout.recorded[cast(Any, module).layer_idx] = k, v
    if layout.prefixes is not None:
        prefix_states = [states[cast(Any, module).layer_idx] for states in layout.prefixes.states]
        attended = attend_to_prefixes(q, k, v, layout, prefix_states, scaling)
        return attended[None], None
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if query.is_cuda and v.dtype in (torch.bfloat16, torch.float16):  # the kernel has no fp32
        return _varlen_attention(q, k, v, layout, scaling, mask, dropout)[None], None
    attended = bucketed_attention(q, k, v, layout.length_buckets, scaling, dropout, mask)
    return attended[None], None


def _varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scaling: float | None,
    mask: AttentionMask,
    dropout: float,
) -> Tensor:
    cu_seqlens, max_seqlen = layout.cu_seqlens, layout.max_seqlen
    sequences = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if dropout > 0.0:  # torch's public function has no dropout, the kernel below it has
        before, after = mask.window_size
        attended, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *sequences, dropout, False, False),
            scale=scaling,
            window_size_left=before,
            window_size_right=after,
        )
        return cast(Tensor, attended)
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {} if mask == UNMASKED else {"window_size": mask.window_size}
    return cast(Tensor, varlen_attn(q, k, v, *sequences, scale=scaling, **options))


def use_packed_attention(model: "PreTrainedModel") -> None:
    """Lets the layers of a model call `packed_attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_IMPLEMENTATION, packed_attention)
    model.set_attn_implementation(ATTENTION_IMPLEMENTATION)
