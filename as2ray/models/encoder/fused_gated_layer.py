"""A fused layer with rotary positions and a gated feed-forward block, before or after its norms."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from as2ray.models.encoder.fused_layers import (
    FusedLinear,
    Rotations,
    int8_products,
    pad_rows,
    projection_dtype,
)
from as2ray.models.encoder.int8 import Int8Linear, Smoothing
from as2ray.models.encoder.length_buckets import AttentionMask, bucketed_self_attention
from as2ray.models.encoder.packed_attention import SequenceLayout, packed_attention


class FusedGatedLayer:
    """A layer over packed states, for inference. Rows after the last token are padding.

    Where norms stand before the products (ModernBERT, decoders), states between layers are fp32, as
    under autocast; elsewhere (GTE, NomicBert) they have the dtype of the products.

    Args:
        layer: A layer of transformers, in evaluation mode.
        dtype: Number format of products. With int8 states are fp32.
        ranges: For int8, see `FusedLayer`.
    """

    def __init__(
        self, layer: Any, dtype: torch.dtype, ranges: Mapping[str, Tensor] | None = None
    ) -> None:
        self.heads = layer.attn if hasattr(layer, "attn") else layer.self_attn
        self.is_pre_norm = not hasattr(layer, "post_mlp_layernorm")
        self.layer_type = getattr(layer, "attention_type", None)
        mlp, self.dtype = layer.mlp, torch.float32 if dtype == torch.int8 else dtype
        if hasattr(self.heads, "Wqkv"):  # ModernBERT
            self.norms = (layer.attn_norm, layer.mlp_norm)
            linears = [[self.heads.Wqkv], [self.heads.Wo], [mlp.Wi], [mlp.Wo]]
            self.activation = mlp.act
        else:
            self.norms = (
                (layer.input_layernorm, layer.post_attention_layernorm)
                if self.is_pre_norm  # decoders
                else (layer.post_attention_layernorm, layer.post_mlp_layernorm)
            )
            linears = [
                [self.heads.q_proj, self.heads.k_proj, self.heads.v_proj],
                [self.heads.o_proj],
                [mlp.gate_proj, mlp.up_proj],
                [mlp.down_proj],
            ]
            self.activation = mlp.act_fn
        weights = [*map(_concatenate, linears)]
        self.head_size = self.heads.head_dim
        groups = getattr(self.heads, "num_key_value_groups", 1)
        num_heads = weights[1][0].shape[1] // self.head_size
        self.num_heads = [num_heads, num_heads // groups, num_heads // groups]
        self.head_norms = [
            getattr(self.heads, name, nn.Identity()) for name in ("q_norm", "k_norm")
        ]  # Qwen3
        self.mask = AttentionMask(
            bool(getattr(self.heads, "is_causal", False)),
            getattr(self.heads, "sliding_window", None),
        )
        self.is_bucketed = groups == 1 and all(
            isinstance(norm, nn.Identity) for norm in self.head_norms
        )
        """Whether a CPU rotates queries and keys in place and attends in one pass of buckets."""
        products: Any
        if ranges is None:
            products = [FusedLinear(*pair, dtype) for pair in weights]
        else:
            products = int8_products(weights, ranges, _int8_feed_forward)
        self.qkv_projection, self.attention_output, self.up, self.down = products

    def __call__(self, hidden: Tensor, layout: SequenceLayout, rotations: Rotations) -> Tensor:
        """Returns states after the layer, [rows, hidden]."""
        hidden = self._convert(hidden)
        return self._finish_layer(self._attend(hidden, layout, rotations), hidden)

    def run_to_tokens(
        self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout, rotations: Rotations
    ) -> Tensor:
        """Returns states of some tokens after the layer, [n, hidden]."""
        hidden = self._convert(hidden)
        attended = self._attend(hidden, layout, rotations)[token_index]
        return self._finish_layer(attended, hidden[token_index])

    def _convert(self, hidden: Tensor) -> Tensor:
        return hidden.float() if self.is_pre_norm else hidden.to(self.dtype)

    def _attend(self, hidden: Tensor, layout: SequenceLayout, rotations: Rotations) -> Tensor:
        num_rows, num_tokens = len(hidden), layout.num_tokens
        if self.is_pre_norm:
            hidden = self.norms[0](hidden).to(self.dtype)
        projected = self.qkv_projection(hidden)[:num_tokens]
        cosines, sines = rotations[self.layer_type]
        is_whole = layout.prefixes is None and layout.recorded is None
        if self.is_bucketed and is_whole and projected.is_cpu:
            qkv = projected.view(num_tokens, 3, -1, self.head_size)
            _rotate_in_place(qkv[:, :2], cosines, sines)
            return bucketed_self_attention(
                qkv,
                layout.length_buckets,
                num_rows,
                self.dtype,
                mask=self.mask,
                scale=getattr(self.heads, "scaling", None),
            )
        heads = projected.view(num_tokens, -1, self.head_size).split(self.num_heads, 1)  # type: ignore[no-untyped-call]
        query, key = (norm(x) for norm, x in zip(self.head_norms, heads))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, heads[2]))
        query, key = (_rotate(x, cosines, sines).to(value.dtype) for x in (query, key))
        attended, _ = packed_attention(
            self.heads,
            query,
            key,
            value,
            None,
            layout=layout,
            scaling=getattr(self.heads, "scaling", None),
            sliding_window=self.mask.sliding_window,
        )
        return pad_rows(attended[0].flatten(1).to(self.dtype), num_rows)

    def _finish_layer(self, attention: Tensor, hidden: Tensor) -> Tensor:
        if self.is_pre_norm:
            hidden = hidden + self.attention_output(attention)
            return hidden + self._feed_forward(self.norms[1](hidden).to(self.dtype))
        hidden = _normalize(self.norms[0], self.attention_output(attention, residual=hidden))
        return _normalize(self.norms[1], self._feed_forward(hidden, residual=hidden))

    def _feed_forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        gate, up = self.up(hidden).chunk(2, -1)
        return self.down(self.activation(gate).mul_(up), residual=residual)  # type: ignore[no-any-return]


def _concatenate(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Returns weights and bias of one product instead of several of the same states."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weights = torch.cat([*(linear.weight for linear in linears)])
    return weights, torch.cat([*biases]) if biases else None


def _int8_feed_forward(
    gate_and_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    ranges: Mapping[str, Tensor],
) -> list[Int8Linear]:
    # The second half is multiplied by the gate, so dividing it smooths the inputs of `down`.
    smoothing = Smoothing.fit(down[0], ranges["down"], moves=False)
    (gate, up), (gate_bias, up_bias) = (x.chunk(2) for x in gate_and_up)
    up, up_bias = smoothing.smoothed_outputs(up, up_bias)
    first = torch.cat([gate, up]), torch.cat([gate_bias, up_bias])
    return [
        Int8Linear(*first, ranges["up"], is_smoothed=True, output_dtype=projection_dtype()),
        Int8Linear(
            *smoothing.for_smoothed_inputs(*down), smoothing.smoothed_ranges(ranges["down"])
        ),
    ]


def _normalize(norm: nn.LayerNorm, hidden: Tensor) -> Tensor:
    """Normalizes over the last axis, in fp32 inside, and returns the dtype of the states."""
    weights, bias = norm.weight.to(hidden.dtype), norm.bias.to(hidden.dtype)
    return functional.layer_norm(hidden, hidden.shape[-1:], weights, bias, norm.eps)


def _rotate_in_place(x: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotates each head's pairs of elements, [tokens, 2, heads, head size], in fp32."""
    cosine, sine = (part[0, :, None, None].chunk(2, -1) for part in (cosines, sines))
    first, second = x.float().chunk(2, -1)
    size = first.shape[-1]
    rotated = (first * cosine[0]).addcmul_(second, sine[0], value=-1.0)
    x[..., size:] = (second * cosine[1]).addcmul_(first, sine[1])
    x[..., :size] = rotated


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates each head's pairs of elements, [1, heads, tokens, head size], in fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.addcmul(x * cosines[:, None], torch.cat([-second, first], -1), sines[:, None])
