"""The feed-forward heads of cascades and of joint models."""

from itertools import chain, pairwise

from torch import nn


def build_feed_forward(
    hidden_size: int,
    num_outputs: int,
    dropout: float,
    num_hidden_layers: int,
    input_size: int | None = None,
) -> nn.Sequential:
    """Builds dense layers with tanh that map states [n, inputs] to outputs [n, outputs].

    Args:
        hidden_size: Size of the hidden layers.
        num_outputs: Size of the output.
        dropout: Dropout before each layer.
        num_hidden_layers: Number of layers before the last.
        input_size: Size of a state; by default that of the hidden layers.
    """
    sizes = [input_size or hidden_size, *[hidden_size] * num_hidden_layers]
    hidden_layers = [
        (nn.Dropout(dropout), nn.Linear(size, next_size), nn.Tanh())
        for size, next_size in pairwise(sizes)
    ]
    output_layer = nn.Linear(hidden_size, num_outputs)
    return nn.Sequential(*chain.from_iterable(hidden_layers), nn.Dropout(dropout), output_layer)
