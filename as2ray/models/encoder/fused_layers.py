"""Encoder layers for inference: the weights of transformers' layers in fewer, cheaper operations.

Query, key and value are one product. Weights are converted to the dtype of the products once and
reordered once where oneDNN runs them; the module `int8` has products of bytes. If a head reads only
the first token, the last layer computes only that token after its attention, which saves three
quarters of its products. For oneDNN, states are padded with rows of zeros to a multiple of
`ROW_MULTIPLE`: it compiles and keeps a kernel of about 1 MB for every number of rows, and packed
batches have ever new ones. `Encoder.layers` stays the reference that fused layers must equal.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from as2ray.models.encoder.disentangled_attention import (
    PositionProjections,
    disentangled_attention,
)
from as2ray.models.encoder.gpu_graphs import LayerGraphs
from as2ray.models.encoder.int8 import (
    ATTENTION,
    LAYER_PARTS,
    PRODUCTS,
    ActivationRanges,
    Int8Linear,
    ObservedLinear,
    OutlierChannels,
    Smoothing,
    find_outliers,
    weights_checksum,
)
from as2ray.models.encoder.length_buckets import bucketed_self_attention
from as2ray.models.encoder.packed_attention import SequenceLayout, packed_attention
from as2ray.models.precision import resolve_dtype

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
        # cuBLAS computes the tanh form of GELU with the product. It differs from the exact form by
        # at most 0.0005, which is less than bf16 rounds off above 0.25.
        self.has_gelu_product = self.weights.is_cuda and dtype == torch.bfloat16
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
        if activation != "none" and self.has_gelu_product and self.bias is not None:
            return torch._addmm_activation(self.bias, x, self.weights.t(), use_gelu=True)
        product = functional.linear(x, self.weights, self.bias)
        if residual is not None:
            return product.add_(residual)
        if activation == "none":
            return product
        return functional.gelu(product, approximate="tanh" if activation == "gelu_tanh" else "none")


class CastLinear:
    """A product between states in fp32 that is computed in bf16, or in fp32 where that is faster.

    Args:
        weights: Shape [out, in].
        bias: Shape [out].
    """

    def __init__(self, weights: Tensor, bias: Tensor) -> None:
        self.dtype = resolve_dtype("auto", weights.device)
        self.linear = FusedLinear(weights, bias, self.dtype)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, activation: str = "none"
    ) -> Tensor:
        """Returns the product, plus a residual in fp32 or through an activation; see `FusedLinear`.

        With a residual it is in fp32.
        """
        product = self.linear(x.to(self.dtype), activation=activation)
        return product if residual is None else product + residual


def _has_bf16_outputs() -> bool:
    """Returns whether oneDNN's products on this CPU can have results in bf16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def projection_dtype() -> torch.dtype:
    """Returns the number format of int8 products whose results are converted anyway."""
    return torch.bfloat16 if _has_bf16_outputs() else torch.float32


def int8_products(
    weights: Sequence[tuple[Tensor, Tensor | None]],
    ranges: Mapping[str, Tensor],
    make_feed_forward: Callable[..., list[Int8Linear]],
) -> list[Int8Linear | CastLinear]:
    """Returns `PRODUCTS` of a layer, those with ranges in int8.

    Args:
        weights: Weights and bias of each product.
        ranges: See `FusedLayer`.
        make_feed_forward: Makes the last two in int8 of their weights and the ranges.
    """
    pairs = [
        (w.detach().float(), w.new_zeros(len(w)).float() if b is None else b.detach().float())
        for w, b in weights
    ]
    products: list[Int8Linear | CastLinear] = []
    for part, (first, second) in zip(LAYER_PARTS, (pairs[:2], pairs[2:])):
        if not ranges.keys() >= set(LAYER_PARTS[part]):
            products += [CastLinear(*first), CastLinear(*second)]
        else:
            make = int8_attention if part == ATTENTION else make_feed_forward
            products += make(first, second, ranges)
    return products


def int8_attention(
    qkv: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor], ranges: Mapping[str, Tensor]
) -> list[Int8Linear]:
    """Returns the products before and after attention in int8.

    Args:
        qkv: Weights and bias of queries, keys and values.
        output: Those of the product after attention.
        ranges: See `FusedLayer`.
    """
    num_values, dtype = output[0].shape[1], projection_dtype()
    if len(qkv[0]) != 3 * num_values:  # several heads share their values
        first = Int8Linear(*qkv, ranges["qkv_projection"], is_smoothed=True, output_dtype=dtype)
        return [first, Int8Linear(*output, ranges["attention_output"], is_smoothed=True)]
    # Attention takes a mean of the values, so smoothing them smooths what it gives.
    smoothing = Smoothing.fit(output[0], ranges["attention_output"])
    (other_weights, value_weights), (other_bias, value_bias) = (
        x.tensor_split([-num_values]) for x in qkv
    )
    value_weights, value_bias = smoothing.smoothed_outputs(value_weights, value_bias)
    return [
        Int8Linear(
            torch.cat([other_weights, value_weights]),
            torch.cat([other_bias, value_bias]),
            ranges["qkv_projection"],
            is_smoothed=True,
            output_dtype=dtype,
        ),
        Int8Linear(
            *smoothing.for_smoothed_inputs(*output),
            smoothing.smoothed_ranges(ranges["attention_output"]),
        ),
    ]


def _can_reorder_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether oneDNN can reorder weights of this dtype once, ahead of its products."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and _has_bf16_outputs()
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

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Normalizes a sum [rows, hidden] over the last axis, on an NVIDIA GPU."""
        from as2ray.models.encoder.gpu_kernels import add_and_norm

        return add_and_norm(x, residual, self.weights, self.bias, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes over the last axis."""
        return functional.layer_norm(x, x.shape[-1:], self.weights, self.bias, self.eps)


class FusedLayer:
    """A layer over packed states, for inference. Rows after the last token are padding.

    Args:
        layer: A layer of transformers, in evaluation mode.
        dtype: Number format of the products. That of states and norms is the same, or fp32 for
            int8.
        distances: DeBERTa's embeddings of distances, [distances, hidden].
        ranges: For int8, the ranges of the inputs of those of `PRODUCTS` that are computed in int8.
    """

    def __init__(
        self,
        layer: nn.Module,
        dtype: torch.dtype,
        distances: Tensor | None = None,
        ranges: Mapping[str, Tensor] | None = None,
    ) -> None:
        heads, projections, dense, attention_norm, *feed_forward_modules = _find_modules(layer)
        up, activation, down, output_norm = feed_forward_modules
        self.head_size, self.heads = heads.attention_head_size, heads
        self.dtype = torch.float32 if dtype == torch.int8 else dtype
        has_relative_positions = hasattr(heads, "query_proj")
        self.is_bucketed = not has_relative_positions
        is_half = dtype in (torch.bfloat16, torch.float16)
        self.has_kernels = dense.weight.is_cuda and is_half and has_triton()
        self.fused_activation, self.activation = split_activation(activation)
        self.outliers: OutlierChannels | None = None
        self.attention_norm = FusedLayerNorm(attention_norm, self.dtype)
        self.output_norm = FusedLayerNorm(output_norm, self.dtype)
        qkv = (torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections]))
        weights = [qkv, *((linear.weight, linear.bias) for linear in (dense, up, down))]
        products: Any
        if ranges is None:
            products = [FusedLinear(*pair, dtype) for pair in weights]
        else:
            feed_forward = partial(self._int8_feed_forward, activation)
            products = int8_products(weights, ranges, feed_forward)
        self.qkv_projection, self.attention_output, self.up, self.down = products
        self.positions: PositionProjections | None = None
        if has_relative_positions:
            with torch.no_grad():
                self.positions = PositionProjections.from_layer(heads, distances)

    def _int8_feed_forward(
        self,
        activation: Callable[[Tensor], Tensor],
        up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor],
        ranges: Mapping[str, Tensor],
    ) -> list[Int8Linear]:
        inner_ranges, down_weights = ranges["down"], down[0]
        channels = find_outliers(inner_ranges)
        if len(channels):
            self.outliers = OutlierChannels(channels, up, down_weights, activation)
            inner_ranges, down_weights = inner_ranges.clone(), down_weights.clone()
            inner_ranges[:, channels], down_weights[:, channels] = 0.0, 0.0
        # With another activation than GELU the states between the two products are fp32.
        output_ranges = None if self.fused_activation == "none" else inner_ranges
        return [
            Int8Linear(*up, ranges["up"], is_smoothed=True, output_ranges=output_ranges),
            Int8Linear(down_weights, down[1], inner_ranges),
        ]

    @property
    def has_graphs(self) -> bool:
        """Whether all its operations can be recorded in a CUDA graph."""
        return self.has_kernels and self.positions is None

    def __call__(self, hidden: Tensor, layout: SequenceLayout, rotations: Rotations) -> Tensor:
        """Returns states after the layer, [rows, hidden]."""
        hidden = hidden.to(self.dtype)
        return self._finish_layer(self._attend(hidden, layout), hidden)

    def run_to_tokens(
        self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout, rotations: Rotations
    ) -> Tensor:
        """Returns states of some tokens after the layer, [n, hidden]."""
        hidden = hidden.to(self.dtype)
        if self.is_bucketed and hidden.is_cpu and layout.are_first_tokens(token_index):
            attended = self._attend(hidden, layout, len(token_index))
        else:
            attended = self._attend(hidden, layout)[token_index]
        return self._finish_layer(attended, hidden[token_index])

    def _attend(
        self, hidden: Tensor, layout: SequenceLayout, num_first_rows: int | None = None
    ) -> Tensor:
        """Returns the results of attention, [rows, hidden].

        Args:
            hidden: Packed states, [rows, hidden].
            layout: Positions of the sequences in them.
            num_first_rows: Number of rows if only the first token of each sequence attends.
        """
        projected = self.qkv_projection(hidden)[: layout.num_tokens].view(
            layout.num_tokens, 3, -1, self.head_size
        )
        if self.positions is not None:
            attended = disentangled_attention(
                self.heads, projected.unbind(1), layout, self.positions
            )
            return pad_rows(attended, len(hidden))
        if self.has_kernels and self._is_short(layout):
            from as2ray.models.encoder.gpu_kernels import short_attention

            return short_attention(projected, layout.cu_seqlens, layout.length_buckets)
        if self.is_bucketed and projected.is_cpu:
            return bucketed_self_attention(
                projected,
                layout.length_buckets,
                num_first_rows or len(hidden),
                self.dtype,
                num_first_rows is not None,
            )
        query, key, value = (x.transpose(0, 1)[None] for x in projected.unbind(1))
        attended, _ = packed_attention(self.heads, query, key, value, None, layout=layout)
        return pad_rows(attended[0].flatten(1), len(hidden))

    def _is_short(self, layout: SequenceLayout) -> bool:
        from as2ray.models.encoder.gpu_kernels import HEAD_SIZES, MAX_SEQUENCE_LENGTH

        return layout.max_seqlen <= MAX_SEQUENCE_LENGTH and self.head_size in HEAD_SIZES

    def _finish_layer(self, attention: Tensor, hidden: Tensor) -> Tensor:
        if self.has_kernels:
            hidden = self.attention_norm.add(self.attention_output(attention), hidden)
            inner = self.activation(self.up(hidden, activation=self.fused_activation))
            return self.output_norm.add(self.down(inner), hidden)
        hidden = self.attention_norm(self.attention_output(attention, residual=hidden))
        inner = self.activation(self.up(hidden, activation=self.fused_activation))
        residual = hidden if self.outliers is None else self.outliers(hidden)
        return self.output_norm(self.down(inner, residual=residual))


@cache
def has_triton() -> bool:
    """Returns whether Triton is there, which comes with torch for NVIDIA GPUs on Linux."""
    return find_spec("triton") is not None


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
        dtype: Number format of the products; see `FusedLayer`.
        distances: DeBERTa's embeddings of distances, [distances, hidden].
        ranges: For int8, the ranges of the products' inputs.
    """

    layers: list[list[Any]]

    def __init__(
        self,
        layers: Sequence[nn.Module],
        dtype: torch.dtype,
        distances: Tensor | None = None,
        ranges: ActivationRanges | None = None,
    ) -> None:
        self.fingerprint = _weights_fingerprint(layers, dtype, distances, ranges)
        device = next(layers[0].parameters()).device
        is_padded = dtype == torch.int8 or _can_reorder_weights(device, dtype)
        self.row_multiple = ROW_MULTIPLE if is_padded else 1
        self.modules = distinct_layers(layers)
        fused = {
            id(layer): _fuse_layer(
                layer, dtype, distances, None if ranges is None else ranges.of_layer(i)
            )
            for i, layer in enumerate(self.modules)
        }
        self.layers = [[fused[id(layer)] for layer in _unroll_layers([group])] for group in layers]
        has_graphs = all(isinstance(x, FusedLayer) and x.has_graphs for x in fused.values())
        self.graphs = LayerGraphs() if has_graphs else None

    def observe(self) -> None:
        """Lets all products keep the ranges of their inputs."""
        for layer in self._distinct:
            for name in PRODUCTS:
                setattr(layer, name, ObservedLinear(getattr(layer, name)))

    def observed_ranges(self) -> ActivationRanges:
        """Returns the ranges of all inputs since `observe`."""
        layers = tuple(
            {name: getattr(layer, name).ranges.cpu() for name in PRODUCTS}
            for layer in self._distinct
        )
        return ActivationRanges(layers, weights_checksum(self.modules))

    @property
    def _distinct(self) -> list[FusedLayer]:
        return list({id(layer): layer for layer in chain.from_iterable(self.layers)}.values())

    def run_layers(
        self,
        hidden: Tensor,
        layout: SequenceLayout,
        start_layer: int,
        end_layer: int | None,
        rotations: Rotations,
    ) -> Tensor:
        """Runs the layers from `start_layer` to before `end_layer`, [tokens, hidden]."""
        layers = list(chain.from_iterable(self.layers[start_layer:end_layer]))

        def run(hidden: Tensor, layout: SequenceLayout, _: Tensor) -> Tensor:
            for layer in layers:
                hidden = layer(hidden, layout, rotations)
            return hidden

        states, no_index = None, layout.cu_seqlens[:0]
        # A kernel starts on the GPU of its thread, which need not be that of the states.
        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
            if self.graphs is not None and layers:
                states = self.graphs.run((start_layer, end_layer), run, hidden, layout, no_index)
            if states is None:
                states = run(self._round_up_rows(hidden), layout, no_index)
        return states[: layout.num_tokens]

    def run_to_tokens(
        self,
        token_index: Tensor,
        hidden: Tensor,
        layout: SequenceLayout,
        start_layer: int,
        rotations: Rotations,
    ) -> Tensor:
        """Returns states of some tokens after the layers from `start_layer` on, [n, hidden]."""
        *lower_layers, last_layer = chain.from_iterable(self.layers[start_layer:])

        def run(hidden: Tensor, layout: SequenceLayout, token_index: Tensor) -> Tensor:
            for layer in lower_layers:
                hidden = layer(hidden, layout, rotations)
            return last_layer.run_to_tokens(token_index, hidden, layout, rotations)  # type: ignore[no-any-return]

        states = None
        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
            if self.graphs is not None and len(token_index) <= len(layout.first_tokens):
                states = self.graphs.run(start_layer, run, hidden, layout, token_index)
            if states is None:
                rows = self._round_up_rows(hidden), layout, self._round_up_rows(token_index)
                states = run(*rows)
        return states[: len(token_index)]

    def _round_up_rows(self, rows: Tensor) -> Tensor:
        return pad_rows(rows, -(-len(rows) // self.row_multiple) * self.row_multiple)

    def is_current(
        self,
        layers: Sequence[nn.Module],
        dtype: torch.dtype,
        distances: Tensor | None,
        ranges: ActivationRanges | None,
    ) -> bool:
        """Returns whether dtype, ranges and weights are unchanged since the layers were fused."""
        return self.fingerprint == _weights_fingerprint(layers, dtype, distances, ranges)


def _fuse_layer(
    layer: Any,
    dtype: torch.dtype,
    distances: Tensor | None,
    ranges: Mapping[str, Tensor] | None,
) -> Any:
    if hasattr(layer, "mlp"):
        from as2ray.models.encoder.fused_gated_layer import FusedGatedLayer

        return FusedGatedLayer(layer, dtype, ranges)
    return FusedLayer(layer, dtype, distances, ranges)


def pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Appends rows of zeros, up to `num_rows`."""
    num_missing = num_rows - len(rows)
    return torch.cat([rows, rows.new_zeros(num_missing, *rows.shape[1:])]) if num_missing else rows


def _unroll_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the layers; an ALBERT group is replaced by its layers."""
    return [layer for group in layers for layer in getattr(group, "albert_layers", [group])]


def distinct_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns each layer once, in the order of their first run."""
    return list({id(layer): layer for layer in _unroll_layers(layers)}.values())


def _weights_fingerprint(
    layers: Sequence[nn.Module],
    dtype: torch.dtype,
    distances: Tensor | None,
    ranges: ActivationRanges | None,
) -> tuple[object, ...]:
    """Returns values that change when a weight changes: addresses, versions and norms of biases.

    Writing through `.data`, as weight averaging does, changes a norm but no version.
    """
    weights = [w for layer in layers for w in layer.parameters()]
    vectors = [w.detach() for w in weights if w.ndim == 1]
    norms = torch.stack(torch._foreach_norm(vectors)).tolist()  # a GPU takes few operations
    distance_sum = None if distances is None else float(distances.detach().abs().sum())
    versions = tuple((w.data_ptr(), w._version) for w in weights)
    return dtype, ranges, tuple(norms), versions, distance_sum
