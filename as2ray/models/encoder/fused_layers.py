"""Layers for ranking alone: the weights of transformers' layers in fewer and cheaper operations.

Knows where BERT, RoBERTa, ELECTRA and ALBERT keep the weights of a layer. Must not know heads,
training or files. The layers themselves (`Encoder.layers`) stay the reference that these equal.

Query, key and value are one product; weights lie in the number format of the products, on a CPU
reordered for them once; and where a head looks at the first token alone, the last layer computes
only that token after its attention, which leaves out three quarters of its products. Where oneDNN
multiplies, states are filled with rows of zeros to a round number: it compiles and keeps a product
for every number it meets, about a megabyte each, and packed batches bring ever new ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from as2ray.models.encoder.packed_attention import SequenceLayout, packed_attention

ROW_MULTIPLE = 64
"""What rows of a product of oneDNN are filled to a multiple of."""


@dataclass(frozen=True)
class _LayerModules:
    """A layer's modules, by what they do."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attention_output: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    activation: Callable[[Tensor], Tensor]
    down: nn.Linear
    output_norm: nn.LayerNorm
    head_size: int


def _find_modules(layer: Any) -> _LayerModules:
    """Of a layer of any supported family."""
    if hasattr(layer, "ffn"):  # ALBERT
        a = layer.attention
        attention = (a.query, a.key, a.value, a.dense, a.LayerNorm)
        feed_forward = (layer.ffn, layer.activation, layer.ffn_output, layer.full_layer_layer_norm)
        return _LayerModules(*attention, *feed_forward, a.attention_head_size)
    a, out, last = layer.attention.self, layer.attention.output, layer.output
    attention = (a.query, a.key, a.value, out.dense, out.LayerNorm)
    up = layer.intermediate
    feed_forward = (up.dense, up.intermediate_act_fn, last.dense, last.LayerNorm)
    return _LayerModules(*attention, *feed_forward, a.attention_head_size)


class FusedLinear:
    """A product with fixed weights, and what follows it.

    Args:
        weights: Shape [out, in].
        bias: Shape [out].
        dtype: Number format.
    """

    def __init__(self, weights: Tensor, bias: Tensor, dtype: torch.dtype) -> None:
        self.weights = weights.detach().to(dtype)
        self.bias = bias.detach().to(dtype)
        self.reordered_weights = None
        if _can_reorder_weights(weights.device, dtype):
            self.reordered_weights = torch.ops.mkldnn._reorder_linear_weight(self.weights, None)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, activation: str = "none"
    ) -> Tensor:
        """The product; with `plus` added, or `then` a "gelu" (exact) or "gelu_tanh"."""
        if self.reordered_weights is not None:
            linear = torch.ops.mkldnn._linear_pointwise
            if residual is not None:
                return linear.binary(x, residual, self.reordered_weights, self.bias, "add")  # type: ignore[no-any-return]
            kind, _, how = activation.partition("_")
            return linear(x, self.reordered_weights, self.bias, kind, [], how or "none")  # type: ignore[no-any-return]
        found = functional.linear(x, self.weights, self.bias)
        if residual is not None:
            return found.add_(residual)
        if activation == "none":
            return found
        return functional.gelu(found, approximate="tanh" if activation == "gelu_tanh" else "none")


def _can_reorder_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN keeps weights of this format reordered for its products."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class FusedLayerNorm:
    """Layer normalisation with fixed weights.

    Args:
        norm: Where they are.
        dtype: Number format.
    """

    def __init__(self, norm: nn.LayerNorm, dtype: torch.dtype) -> None:
        self.weights, self.bias = norm.weight.detach().to(dtype), norm.bias.detach().to(dtype)
        self.eps = norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised over the last axis."""
        return functional.layer_norm(x, x.shape[-1:], self.weights, self.bias, self.eps)


class FusedLayer:
    """A layer over packed states, for inference; rows after the sequences' mean nothing.

    Args:
        layer: Of transformers, in evaluation mode.
        dtype: Number format of everything in it.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        parts = _find_modules(layer)
        projections = (parts.query, parts.key, parts.value)
        self.qkv_projection = FusedLinear(
            torch.cat([p.weight for p in projections]),
            torch.cat([p.bias for p in projections]),
            dtype,
        )
        self.attention_output = FusedLinear(
            parts.attention_output.weight, parts.attention_output.bias, dtype
        )
        self.attention_norm = FusedLayerNorm(parts.attention_norm, dtype)
        self.up = FusedLinear(parts.up.weight, parts.up.bias, dtype)
        self.fused_activation, self.activation = _split_activation(parts.activation)
        self.down = FusedLinear(parts.down.weight, parts.down.bias, dtype)
        self.output_norm = FusedLayerNorm(parts.output_norm, dtype)
        self.head_size, self.dtype, self.module = parts.head_size, dtype, layer

    def __call__(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """States after the layer, [rows, hidden]."""
        hidden = hidden.to(self.dtype)
        return self._finish_layer(self._attend(hidden, layout), hidden)

    def run_to_tokens(self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """States of some tokens after the layer, [n, hidden]; the others are only attended to."""
        hidden = hidden.to(self.dtype)
        return self._finish_layer(self._attend(hidden, layout)[token_index], hidden[token_index])

    def _attend(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        projected = self.qkv_projection(hidden)[: layout.num_tokens].view(
            layout.num_tokens, 3, -1, self.head_size
        )
        query, key, value = (x.transpose(0, 1)[None] for x in projected.unbind(1))
        attended, _ = packed_attention(self.module, query, key, value, None, layout=layout)
        return _pad_rows(attended[0].flatten(1), len(hidden))

    def _finish_layer(self, attention: Tensor, hidden: Tensor) -> Tensor:
        hidden = self.attention_norm(self.attention_output(attention, plus=hidden))
        inner = self.activation(self.up(hidden, then=self.fused_activation))
        return self.output_norm(self.down(inner, plus=hidden))


def _split_activation(
    function: Callable[[Tensor], Tensor],
) -> tuple[str, Callable[[Tensor], Tensor]]:
    """What the product can do itself, and what is left to do after it."""
    names = {"GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh"}
    name = names.get(type(function).__name__)
    return (name, nn.Identity()) if name else ("none", function)


class FusedLayers:
    """All layers of an encoder, made again when weights have changed.

    Args:
        layers: Of transformers, in the order they run; one that runs twice is kept once.
        dtype: Number format of everything in them.
    """

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self.fingerprint = _weights_fingerprint(layers, dtype)
        device = next(layers[0].parameters()).device
        self.row_multiple = ROW_MULTIPLE if _can_reorder_weights(device, dtype) else 1
        made = {id(layer): FusedLayer(layer, dtype) for layer in _unroll_layers(layers)}
        self.layers = [[made[id(one)] for one in _unroll_layers([layer])] for layer in layers]

    def run_layers(
        self, hidden: Tensor, layout: SequenceLayout, start_layer: int, end_layer: int | None
    ) -> Tensor:
        """States after layers `first` to `last` - 1, [tokens, hidden]."""
        hidden = self._round_up_rows(hidden)
        for layer in [one for group in self.layers[start_layer:end_layer] for one in group]:
            hidden = layer(hidden, layout)
        return hidden[: layout.num_tokens]

    def run_to_tokens(self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """States of some tokens after all layers, [n, hidden]."""
        *before, last = [one for group in self.layers for one in group]
        hidden = self._round_up_rows(hidden)
        for layer in before:
            hidden = layer(hidden, layout)
        return last.run_to_tokens(self._round_up_rows(token_index), hidden, layout)[
            : len(token_index)
        ]

    def _round_up_rows(self, rows: Tensor) -> Tensor:
        return _pad_rows(rows, -(-len(rows) // self.row_multiple) * self.row_multiple)

    def is_current(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> bool:
        """Whether these are still the layers' weights."""
        return self.fingerprint == _weights_fingerprint(layers, dtype)


def _pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Rows with zeros after them, so many in all."""
    missing = num_rows - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _unroll_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers, an ALBERT group's one by one."""
    return [one for layer in layers for one in getattr(layer, "albert_layers", [layer])]


def _weights_fingerprint(layers: Sequence[nn.Module], dtype: torch.dtype) -> tuple[object, ...]:
    """What changes when a weight does: where each lies, and how often it was written to; what is
    written through `.data`, as averages of weights are, counts no version and changes a sum.
    """
    weights = [w for layer in layers for w in layer.parameters()]
    sums = torch.stack([w.detach().sum() for w in weights if w.ndim == 1]).tolist()
    return dtype, tuple(sums), tuple((w.data_ptr(), w._version) for w in weights)
