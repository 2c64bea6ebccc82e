"""Encoder layers for inference: the weights of transformers' layers in fewer, cheaper operations.

Query, key and value are one product. Weights are converted to the dtype of the products once and
reordered once where oneDNN runs them. If a head reads only the first token, the last layer computes
only that token after its attention, which saves three quarters of its products. For oneDNN, states
are padded with rows of zeros to a multiple of `ROW_MULTIPLE`: it compiles and keeps a kernel of
about 1 MB for every number of rows, and packed batches have ever new ones. `Encoder.layers` stays
the reference that fused layers must equal.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from as2ray.models.encoder.disentangled_attention import (
    PositionProjections,
    disentangled_attention,
)
from as2ray.models.encoder.packed_attention import SequenceLayout, packed_attention

Rotations = Mapping[str | None, tuple[Tensor, Tensor]]
"""Cosines and sines of the positions, [1, tokens, head size], by type of layer; may be empty."""

ROW_MULTIPLE = 64
"""The number of rows of a oneDNN product is padded to a multiple of this."""


def _find_modules(layer: Any) -> tuple[Any, ...]:
    """Finds the modules in a layer whose positions enter with the embeddings.

    Returns:
        Self-attention; its projections to query, key and value; dense layer and norm after it;
        dense layer and activation that enlarge states; dense layer and norm that reduce them.
    """
    heads = layer.attention
    if hasattr(layer, "sa_layer_norm"):  # DistilBERT
        projections, ffn = (heads.q_lin, heads.k_lin, heads.v_lin), layer.ffn
        feed_forward = (ffn.lin1, ffn.activation, ffn.lin2, layer.output_layer_norm)
        return heads, projections, heads.out_lin, layer.sa_layer_norm, *feed_forward
    if hasattr(layer, "ffn"):  # ALBERT
        projections = (heads.query, heads.key, heads.value)
        feed_forward = (layer.ffn, layer.activation, layer.ffn_output, layer.full_layer_layer_norm)
        return heads, projections, heads.dense, heads.LayerNorm, *feed_forward
    output, up, down, heads = heads.output, layer.intermediate, layer.output, heads.self
    if hasattr(heads, "query_proj"):  # DeBERTa
        projections = (heads.query_proj, heads.key_proj, heads.value_proj)
    else:
        projections = (heads.query, heads.key, heads.value)
    feed_forward = (up.dense, up.intermediate_act_fn, down.dense, down.LayerNorm)
    return heads, projections, output.dense, output.LayerNorm, *feed_forward


class FusedLinear:
    """A linear layer with fixed weights, and an operation after it.

    Args:
        weights: Shape [out, in].
        bias: Shape [out], or None.
        dtype: Number format of the product.
    """

    def __init__(self, weights: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weights = weights.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.reordered_weights = None
        if _can_reorder_weights(weights.device, dtype):
            self.reordered_weights = torch.ops.mkldnn._reorder_linear_weight(self.weights, None)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, activation: str = "none"
    ) -> Tensor:
        """Returns the product, plus a residual or through an activation.

        Args:
            x: Shape [rows, in].
            residual: Added to the product, shape [rows, out].
            activation: "gelu" (exact), "gelu_tanh" or "none"; not with a residual.
        """
        if self.reordered_weights is not None:
            linear = torch.ops.mkldnn._linear_pointwise
            if residual is not None:
                return linear.binary(x, residual, self.reordered_weights, self.bias, "add")  # type: ignore[no-any-return]
            name, _, approximation = activation.partition("_")
            approximation = approximation or "none"
            return linear(x, self.reordered_weights, self.bias, name, [], approximation)  # type: ignore[no-any-return]
        product = functional.linear(x, self.weights, self.bias)
        if residual is not None:
            return product.add_(residual)
        if activation == "none":
            return product
        return functional.gelu(product, approximate="tanh" if activation == "gelu_tanh" else "none")


def _can_reorder_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether oneDNN can reorder weights of this dtype once, ahead of its products."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class FusedLayerNorm:
    """Layer normalization with fixed weights.

    Args:
        norm: The module with the weights.
        dtype: Number format of the weights.
    """

    def __init__(self, norm: nn.LayerNorm, dtype: torch.dtype) -> None:
        self.weights, self.bias = norm.weight.detach().to(dtype), norm.bias.detach().to(dtype)
        self.eps = norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes over the last axis."""
        return functional.layer_norm(x, x.shape[-1:], self.weights, self.bias, self.eps)


class FusedLayer:
    """A layer over packed states, for inference. Rows after the last token are padding.

    Args:
        layer: A layer of transformers, in evaluation mode.
        dtype: Number format of weights and states.
        distances: DeBERTa's embeddings of distances, [distances, hidden].
    """

    def __init__(
        self, layer: nn.Module, dtype: torch.dtype, distances: Tensor | None = None
    ) -> None:
        heads, projections, dense, attention_norm, *feed_forward = _find_modules(layer)
        up, activation, down, output_norm = feed_forward
        self.qkv_projection = FusedLinear(
            torch.cat([p.weight for p in projections]),
            torch.cat([p.bias for p in projections]),
            dtype,
        )
        self.attention_output = FusedLinear(dense.weight, dense.bias, dtype)
        self.attention_norm = FusedLayerNorm(attention_norm, dtype)
        self.up = FusedLinear(up.weight, up.bias, dtype)
        self.fused_activation, self.activation = split_activation(activation)
        self.down = FusedLinear(down.weight, down.bias, dtype)
        self.output_norm = FusedLayerNorm(output_norm, dtype)
        self.head_size, self.dtype, self.heads = heads.attention_head_size, dtype, heads
        self.positions: PositionProjections | None = None
        if hasattr(heads, "query_proj"):
            with torch.no_grad():
                self.positions = PositionProjections.from_layer(heads, distances)

    def __call__(self, hidden: Tensor, layout: SequenceLayout, rotations: Rotations) -> Tensor:
        """Returns states after the layer, [rows, hidden]."""
        hidden = hidden.to(self.dtype)
        return self._finish_layer(self._attend(hidden, layout), hidden)

    def run_to_tokens(
        self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout, rotations: Rotations
    ) -> Tensor:
        """Returns states of some tokens after the layer, [n, hidden]."""
        hidden = hidden.to(self.dtype)
        return self._finish_layer(self._attend(hidden, layout)[token_index], hidden[token_index])

    def _attend(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        projected = self.qkv_projection(hidden)[: layout.num_tokens].view(
            layout.num_tokens, 3, -1, self.head_size
        )
        if self.positions is not None:
            attended = disentangled_attention(
                self.heads, projected.unbind(1), layout, self.positions
            )
            return pad_rows(attended, len(hidden))
        query, key, value = (x.transpose(0, 1)[None] for x in projected.unbind(1))
        attended, _ = packed_attention(self.heads, query, key, value, None, layout=layout)
        return pad_rows(attended[0].flatten(1), len(hidden))

    def _finish_layer(self, attention: Tensor, hidden: Tensor) -> Tensor:
        hidden = self.attention_norm(self.attention_output(attention, residual=hidden))
        inner = self.activation(self.up(hidden, activation=self.fused_activation))
        return self.output_norm(self.down(inner, residual=hidden))


def split_activation(
    function: Callable[[Tensor], Tensor],
) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Returns the activation that `FusedLinear` can run, and the one to run after it."""
    names = {"GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh"}
    name = names.get(type(function).__name__)
    return (name, nn.Identity()) if name else ("none", function)


class FusedLayers:
    """All layers of an encoder, fused.

    Args:
        layers: Layers of transformers in the order they run; a repeated layer is stored once.
        dtype: Number format of weights and states.
        distances: DeBERTa's embeddings of distances, [distances, hidden].
    """

    layers: list[list[Any]]

    def __init__(
        self,
        layers: Sequence[nn.Module],
        dtype: torch.dtype,
        distances: Tensor | None = None,
    ) -> None:
        self.fingerprint = _weights_fingerprint(layers, dtype, distances)
        device = next(layers[0].parameters()).device
        self.row_multiple = ROW_MULTIPLE if _can_reorder_weights(device, dtype) else 1
        fused = {
            id(layer): _fuse_layer(layer, dtype, distances) for layer in _unroll_layers(layers)
        }
        self.layers = [[fused[id(layer)] for layer in _unroll_layers([group])] for group in layers]

    def run_layers(
        self,
        hidden: Tensor,
        layout: SequenceLayout,
        start_layer: int,
        end_layer: int | None,
        rotations: Rotations,
    ) -> Tensor:
        """Runs the layers from `start_layer` to before `end_layer`, [tokens, hidden]."""
        hidden = self._round_up_rows(hidden)
        for layer in chain.from_iterable(self.layers[start_layer:end_layer]):
            hidden = layer(hidden, layout, rotations)
        return hidden[: layout.num_tokens]

    def run_to_tokens(
        self,
        token_index: Tensor,
        hidden: Tensor,
        layout: SequenceLayout,
        start_layer: int,
        rotations: Rotations,
    ) -> Tensor:
        """Returns states of some tokens after the layers from `start_layer` on, [n, hidden]."""
        num_tokens = len(token_index)
        *lower_layers, last_layer = chain.from_iterable(self.layers[start_layer:])
        hidden = self._round_up_rows(hidden)
        for layer in lower_layers:
            hidden = layer(hidden, layout, rotations)
        token_index = self._round_up_rows(token_index)
        states: Tensor = last_layer.run_to_tokens(token_index, hidden, layout, rotations)
        return states[:num_tokens]

    def _round_up_rows(self, rows: Tensor) -> Tensor:
        return pad_rows(rows, -(-len(rows) // self.row_multiple) * self.row_multiple)

    def is_current(
        self, layers: Sequence[nn.Module], dtype: torch.dtype, distances: Tensor | None
    ) -> bool:
        """Returns whether dtype and weights are unchanged since the layers were fused."""
        return self.fingerprint == _weights_fingerprint(layers, dtype, distances)


def _fuse_layer(layer: Any, dtype: torch.dtype, distances: Tensor | None) -> Any:
    if hasattr(layer, "mlp"):
        from as2ray.models.encoder.fused_gated_layer import FusedGatedLayer

        return FusedGatedLayer(layer, dtype)
    return FusedLayer(layer, dtype, distances)


def pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Appends rows of zeros, up to `num_rows`."""
    num_missing = num_rows - len(rows)
    return torch.cat([rows, rows.new_zeros(num_missing, *rows.shape[1:])]) if num_missing else rows


def _unroll_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the layers; an ALBERT group is replaced by its layers."""
    return [layer for group in layers for layer in getattr(group, "albert_layers", [group])]


def _weights_fingerprint(
    layers: Sequence[nn.Module], dtype: torch.dtype, distances: Tensor | None
) -> tuple[object, ...]:
    """Returns values that change when a weight changes: addresses, versions and sums of biases.

    Writing through `.data`, as weight averaging does, changes a sum but no version.
    """
    weights = [w for layer in layers for w in layer.parameters()]
    sums = torch.stack([w.detach().sum() for w in weights if w.ndim == 1]).tolist()
    distance_sum = None if distances is None else float(distances.abs().sum())
    versions = tuple((w.data_ptr(), w._version) for w in weights)
    return dtype, tuple(sums), versions, distance_sum
