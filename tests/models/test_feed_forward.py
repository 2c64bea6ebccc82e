import torch
from torch import nn

from as2ray.models.encoder.packed_attention import SequenceLayout
from as2ray.models.encoder.pooling import mean_pool
from as2ray.models.feed_forward import build_feed_forward


def test_layers_have_dropout_before_and_tanh_between_them():
    layers = [*build_feed_forward(6, 2, 0.3, 2, input_size=5)]
    assert [type(layer) for layer in layers] == [
        *(nn.Dropout, nn.Linear, nn.Tanh),
        *(nn.Dropout, nn.Linear, nn.Tanh),
        *(nn.Dropout, nn.Linear),
    ]
    shapes = [tuple(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear)]
    assert shapes == [(6, 5), (6, 6), (2, 6)]
    assert {layer.p for layer in layers if isinstance(layer, nn.Dropout)} == {0.3}


def test_state_has_the_size_of_the_hidden_layers_by_default():
    assert build_feed_forward(6, 1, 0.0, 1)[1].in_features == 6
    assert [type(layer) for layer in build_feed_forward(6, 1, 0.0, 0)] == [nn.Dropout, nn.Linear]


def test_mean_of_a_sequence_may_leave_out_its_first_state():
    hidden = torch.randn(8, 4)
    layout = SequenceLayout.from_lengths([4, 1, 3], torch.device("cpu"))
    parts = hidden.split([4, 1, 3])
    means = torch.stack([part.mean(0) for part in parts])
    torch.testing.assert_close(mean_pool(hidden, layout), means)
    rest = mean_pool(hidden, layout, skip_first=True)
    torch.testing.assert_close(rest[0], parts[0][1:].mean(0))
    torch.testing.assert_close(rest[2], parts[2][1:].mean(0))
    assert rest[1].abs().max() < 1e-6  # a sequence of one token has no other state
