"""Sizes of recorded graphs, which need no GPU."""

from itertools import pairwise

import pytest

from as2ray.models.encoder.gpu_graphs import MIN_TOKENS, _round_up


@pytest.mark.parametrize(
    ("num_tokens", "size"),
    [
        *((0, 256), (1, 256), (192, 256), (256, 256)),
        *((257, 384), (384, 384), (385, 512), (512, 512)),
        *((513, 768), (768, 768), (769, 1_024), (16_384, 16_384)),
    ],
)
def test_size_of_a_graph_is_a_power_of_two_or_three_quarters_of_one(num_tokens, size):
    assert _round_up(num_tokens) == size
    assert isinstance(_round_up(num_tokens), int)


def test_sizes_grow_by_at_most_half():
    sizes = sorted({_round_up(num_tokens) for num_tokens in range(5_000)})
    assert sizes[0] == MIN_TOKENS
    assert all(after <= 1.5 * before for before, after in pairwise(sizes))
