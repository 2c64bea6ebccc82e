"""Products in int8 for inference, on CPUs that multiply bytes natively.

Weights are int8 with a scale for each output (`weight_scales`). Inputs are uint8 with one scale
and one zero point, which follow from the ranges of the inputs in a calibration (post-training
static quantization): so the score of a pair does not depend on the others in its batch. Sums,
biases, residuals, layer norms and softmax are in fp32; queries, keys and values are bf16 where
oneDNN can write it. Between the two products of a feed-forward layer the states stay uint8.

A few channels have values many times as large as all others, which would make one scale for all
of them coarse. Inputs are smoothed: moved by the middle of each channel's range (Outlier
Suppression+, Wei et al. 2023) and divided by a factor for each channel (SmoothQuant, Xiao et al.
2023, equation 4), which bias and weights make up for. After attention that costs nothing, since the
projection of the values does it, and behind a gate neither, since the product of what is multiplied
by the gate does it. Between the two products of a feed-forward layer without a gate nothing can be
smoothed: channels far above all others are computed in fp32 there (`OutlierChannels`).
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

PRODUCTS = ("qkv_projection", "attention_output", "up", "down")
"""Products of a layer whose inputs have ranges; attributes of fused layers."""

ATTENTION, FEED_FORWARD = "attention", "feed_forward"
LAYER_PARTS = {ATTENTION: PRODUCTS[:2], FEED_FORWARD: PRODUCTS[2:]}
"""Products of each part of a layer; either both are in int8 or none."""

SMOOTHING = 0.8
"""Share of the difficulty that smoothing moves from the inputs to the weights (SmoothQuant's
alpha)."""

MAX_OUTLIERS = 8
"""Channels of a feed-forward layer that may be computed in fp32."""

OUTLIER_RATIO = 1.5
"""Channels are outliers that exceed the largest of all others so many times."""

MAX_BYTE, MAX_WEIGHT = 255, 127


@dataclass(frozen=True, eq=False)
class ActivationRanges:
    """Ranges of the inputs of an encoder's products, and the weights that they belong to."""

    layers: tuple[dict[str, Tensor], ...]
    """For each layer and each of `PRODUCTS`, the smallest and the largest value of each input;
    float32, shape [2, in]. A layer that is repeated has one entry."""
    checksum: int
    """`weights_checksum` of the layers."""
    unquantized_parts: frozenset[tuple[int, str]] = frozenset()
    """Index of the layer and name of each of `LAYER_PARTS` that loses too much in int8."""

    def of_layer(self, index: int) -> dict[str, Tensor]:
        """Returns the ranges of the products of a layer that are computed in int8."""
        kept = {part for layer, part in self.unquantized_parts if layer == index}
        unquantized = {name for part in kept for name in LAYER_PARTS[part]}
        return {name: r for name, r in self.layers[index].items() if name not in unquantized}

    def problem(self, layers: Sequence[nn.Module]) -> str | None:
        """Returns why the ranges do not fit the distinct layers of an encoder; None if they do."""
        if len(self.layers) != len(layers):
            return f"they are of {len(self.layers)} layers, but the encoder has {len(layers)}"
        known = {(layer, part) for layer in range(len(layers)) for part in LAYER_PARTS}
        if not self.unquantized_parts <= known:
            return f"they name parts of layers that there are not: {self.unquantized_parts - known}"
        if self.checksum != weights_checksum(layers):
            return "the weights are others than those that they were fitted to"
        return None


def weights_checksum(layers: Iterable[nn.Module]) -> int:
    """Returns the CRC-32 of the weights of layers, in their order."""
    checksum = 0
    for layer in layers:
        for weights in layer.parameters():
            checksum = crc32(weights.detach().float().cpu().numpy().tobytes(), checksum)
    return checksum


class ObservedLinear:
    """A product that keeps the ranges of its inputs.

    Args:
        linear: The product.
    """

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.ranges: Tensor | None = None
        """Shape [2, in]; None before the first product."""

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        """Returns the product; see `FusedLinear`."""
        low, high = x.aminmax(dim=0)
        if self.ranges is not None:
            low, high = low.minimum(self.ranges[0]), high.maximum(self.ranges[1])
        self.ranges = torch.stack([low, high])
        product: Tensor = self.linear(x, **options)
        return product


@dataclass(frozen=True)
class Smoothing:
    """What makes the ranges of a product's inputs alike: x becomes (x - shifts) / divisors."""

    shifts: Tensor
    """The middle of each range, shape [in]."""
    divisors: Tensor
    """SmoothQuant's equation 4 of the moved ranges, shape [in]."""

    @classmethod
    def fit(cls, weights: Tensor, ranges: Tensor, moves: bool = True) -> "Smoothing":
        """Fits it to weights [out, in] and the ranges of their inputs, [2, in].

        Args:
            weights: The weights.
            ranges: The ranges.
            moves: Whether inputs are moved, too, not only divided.
        """
        shifts = ranges.mean(0) if moves else torch.zeros_like(ranges[0])
        inputs = (ranges - shifts).abs().amax(0).clamp(min=1e-5)
        columns = weights.abs().amax(0).clamp(min=1e-5)
        return cls(shifts, inputs**SMOOTHING / columns ** (1 - SMOOTHING))

    def smoothed_ranges(self, ranges: Tensor) -> Tensor:
        """Returns the ranges of smoothed inputs, [2, in]."""
        return (ranges - self.shifts) / self.divisors

    def smoothed_outputs(self, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights [in, ...] and bias of the product whose outputs are to be smoothed."""
        return weights / self.divisors[:, None], (bias - self.shifts) / self.divisors

    def for_smoothed_inputs(self, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights [out, in] and the bias that belong to smoothed inputs."""
        return weights * self.divisors, bias + weights @ self.shifts


class Int8Linear:
    """A linear layer with fixed weights in int8, and an operation after it.

    Args:
        weights: Shape [out, in].
        bias: Shape [out].
        ranges: Ranges of the inputs, shape [2, in]; other inputs are clipped.
        is_smoothed: Whether the inputs are smoothed here.
        output_ranges: Ranges of the next product's inputs, if these are the outputs after the
            activation, [2, out]. The outputs are then uint8.
        output_dtype: Number format of the outputs, if they are not uint8.
    """

    def __init__(
        self,
        weights: Tensor,
        bias: Tensor,
        ranges: Tensor,
        is_smoothed: bool = False,
        output_ranges: Tensor | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.input_factors, self.input_offsets = None, None
        if is_smoothed:
            smoothing = Smoothing.fit(weights, ranges)
            weights, bias = smoothing.for_smoothed_inputs(weights, bias)
            ranges = smoothing.smoothed_ranges(ranges)
            self.input_factors = 1 / smoothing.divisors
            self.input_offsets = -smoothing.shifts / smoothing.divisors
        self.weight_scales = weight_scales(weights)
        quantized = (weights / self.weight_scales[:, None]).round().to(torch.int8)
        self.weights = torch.ops.onednn.qlinear_prepack(quantized, None)
        self.weight_zero_points = torch.zeros(len(weights), dtype=torch.int32)
        self.bias = bias
        self.input = quantization_of(ranges)
        self.output = (1.0, 0) if output_ranges is None else quantization_of(output_ranges)
        self.output_dtype = output_dtype if output_ranges is None else torch.uint8
        # Two threads that silence torch's warning at the same time would let it through.
        _one_pass_operator()

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, activation: str = "none"
    ) -> Tensor:
        """Returns the product, plus a residual or through an activation.

        Args:
            x: Floating point, or uint8 of this input range; shape [rows, in].
            residual: Added to the product; fp32, shape [rows, out].
            activation: See `FusedLinear`.
        """
        if x.dtype != torch.uint8:
            if self.input_factors is not None and self.input_offsets is not None:
                x = torch.addcmul(self.input_offsets, x, self.input_factors)
            x = quantize(x, *self.input)
        product = torch.ops.onednn.qlinear_pointwise
        weights = (self.weights, self.weight_scales, self.weight_zero_points)
        if residual is not None:
            after: tuple[Any, ...] = (1.0, 0, torch.float32, 1.0, 0, "add", 1.0, "none", [], "none")
            return product.binary(x, *self.input, *weights, residual, self.bias, *after)  # type: ignore[no-any-return]
        name, _, approximation = activation.partition("_")
        after = (*self.output, self.output_dtype, name, [], approximation or "none")
        return product(x, *self.input, *weights, self.bias, *after)  # type: ignore[no-any-return]


class OutlierChannels:
    """Adds the feed-forward layer of some inner channels to its input, in fp32.

    In BERT one inner channel of many layers is 4 times as large as the next one, at the separators
    (the decomposition of LLM.int8(), Dettmers et al. 2022, for the inner states).

    Args:
        channels: Indices of the channels, shape [n].
        up: Weights of the first product, shape [inner, in], and its bias, [inner].
        down: Weights of the second product, shape [in, inner].
        activation: The function between the products.
    """

    def __init__(
        self,
        channels: Tensor,
        up: tuple[Tensor, Tensor],
        down: Tensor,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self.up, self.bias = up[0][channels], up[1][channels]
        self.down, self.activation = down[:, channels].T.contiguous(), activation

    def __call__(self, x: Tensor) -> Tensor:
        """Adds the outputs to the input in place, and returns it; fp32, shape [rows, in]."""
        # Weights of the shape [n, in] make the product six times as fast as their transpose.
        inner = self.activation(functional.linear(x, self.up, self.bias))
        return x.addmm_(inner, self.down)


def weight_scales(weights: Tensor) -> Tensor:
    """Returns the scale of each output's int8 weights, shape [out].

    The largest weight becomes 127, or 64 on a CPU that adds two products in 16 bits, which 2 times
    255 times 64 fits.

    Args:
        weights: Shape [out, in].
    """
    largest = 64 if _adds_in_16_bits() else MAX_WEIGHT
    # A row of zeros has no scale.
    return weights.abs().amax(1).clamp(min=torch.finfo().tiny) / largest


@cache
def _adds_in_16_bits() -> bool:
    """Returns whether oneDNN adds products of bytes in 16 bits on this CPU, as without VNNI."""
    inputs = torch.full((1, 64), MAX_BYTE, dtype=torch.uint8)
    weights = torch.ops.onednn.qlinear_prepack(torch.full((1, 64), MAX_WEIGHT).char(), None)
    product = torch.ops.onednn.qlinear_pointwise(
        *(inputs, 1.0, 0, weights, torch.ones(1), torch.zeros(1, dtype=torch.int32), None),
        *(1.0, 0, torch.float32, "none", [], "none"),
    )
    return float(product) != 64 * MAX_BYTE * MAX_WEIGHT


def find_outliers(ranges: Tensor) -> Tensor:
    """Returns the channels with much larger values than all others, shape [n]; often none.

    Args:
        ranges: Ranges of the channels, shape [2, channels].
    """
    highest = ranges.abs().amax(0).topk(min(MAX_OUTLIERS + 1, ranges.shape[1]))
    return highest.indices[highest.values > OUTLIER_RATIO * highest.values[-1]]


def quantization_of(ranges: Tensor) -> tuple[float, int]:
    """Returns the scale and the zero point that map ranges [2, n] to the bytes from 0 to 255."""
    low, high = min(0.0, float(ranges[0].min())), max(0.0, float(ranges[1].max()))
    scale = max(high - low, 1e-5) / MAX_BYTE
    return scale, round(-low / scale)


def quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Returns the bytes of values: round(x / scale) + zero_point, clipped to 0 and 255."""
    operator = _one_pass_operator()
    if operator is None:
        rounded = (x * (1.0 / scale)).round_().add_(zero_point)
        return rounded.clamp_(0, MAX_BYTE).to(torch.uint8)
    # The bytes of the quantized tensor; `int_repr` would copy them, which takes longer.
    storage = operator(x.float().contiguous(), scale, zero_point, torch.quint8).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)[: x.numel()].view(x.shape)


@cache
def _one_pass_operator() -> Callable[..., Tensor] | None:
    """Returns torch's operator that quantizes in one pass, or None if this release has none."""
    if not (hasattr(torch, "quantize_per_tensor") and hasattr(torch, "quint8")):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that a later release will remove it
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)
    return torch.quantize_per_tensor
