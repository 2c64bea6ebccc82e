"""The feed-forward heads of cascades and of joint models."""

from itertools import chain

from torch import nn


def build_feed_forward(
    hidden_size: int, num_outputs: int, dropout: float, num_hidden_layers: int
) -> nn.Sequential:
    """Builds dense layers with tanh that map states [n, hidden] to outputs [n, outputs].

    Args:
        hidden_size: Size of a token's state, and of the hidden layers.
        num_outputs: Size of the output.
        dropout: Dropout before each layer.
        num_hidden_layers: Number of layers before the last.
    """
    hidden_layers = [
        (nn.Dropout(dropout), nn.Linear(hidden_size, hidden_size), nn.Tanh())
        for _ in range(num_hidden_layers)
    ]
    output_layer = nn.Linear(hidden_size, num_outputs)
    return nn.Sequential(*chain.from_iterable(hidden_layers), nn.Dropout(dropout), output_layer)
