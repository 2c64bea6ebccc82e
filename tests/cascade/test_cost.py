from types import SimpleNamespace

import numpy as np
import pytest

from as2ray.cascade.cost import (
    EncoderShape,
    batch_sizes,
    count_flops,
    measure_relative_cost,
    observed_drop_ratios,
    relative_flops,
    relative_layers,
)
from as2ray.cascade.pruning import expand_drop_ratios
from as2ray.errors import ConfigError

EXITS = (4, 6, 8, 10, 12)


def layers_of(exits, drop, *args, **kwargs):
    return relative_layers(exits, expand_drop_ratios(drop, len(exits)), *args, **kwargs)


def flops_of(shape, exits, drop, *args, **kwargs):
    return relative_flops(shape, exits, expand_drop_ratios(drop, len(exits)), *args, **kwargs)


@pytest.mark.parametrize(("drop", "saved"), [(0.3, 37), (0.4, 45), (0.5, 51)])
def test_layer_cost_of_the_cascade_is_the_paper_s(drop, saved):
    assert round(100 * (1 - layers_of(EXITS, drop))) == saved


@pytest.mark.parametrize(("drop", "more"), [(0.3, 54), (0.4, 18), (0.5, -8)])
def test_layer_cost_of_the_sequential_ranker_is_the_paper_s(drop, more):
    # The paper prints +53 and -10 where its own formula gives +53.6 and -8.3.
    assert round(100 * (layers_of(EXITS, drop, sequential=True) - 1)) == more


def test_layer_cost_with_nothing_dropped_is_that_of_the_layers():
    assert layers_of(EXITS, 0.0) == 1.0
    assert layers_of((4,), 0.0, num_layers=12) == pytest.approx(1 / 3)
    assert layers_of((2, 4), (0.5,), num_layers=4) == pytest.approx(0.75)


def test_operations_of_a_layer_equal_a_count_by_hand():
    shape, tokens = (
        EncoderShape(hidden_size=4, intermediate_size=8, embedding_size=4, num_layers=1),
        np.array([3, 5]),
    )
    products = 4 * 4 * 4 + 2 * 4 * 8  # query, key, value, output; up, down
    attention = 2 * (9 + 25) * 4 * 2  # scores and weighted sum
    head = 2 * 2 * (4 * 4 + 4 * 2)
    assert count_flops(shape, [1], [tokens], sequential=True) == 2 * 8 * products + attention + head


def test_operations_count_the_projection_of_small_embeddings():
    same, small = EncoderShape(embedding_size=768), EncoderShape(embedding_size=128)
    tokens = np.array([40])
    more = count_flops(small, [12], [tokens]) - count_flops(same, [12], [tokens])
    assert more == 2 * 40 * 128 * 768
    # Once, of what enters the first layer; each independent ranker has its own.
    stages = [np.array([40, 9]), np.array([40]), np.array([40])]
    for exits, sequential, num_tokens in (
        ((2, 4, 6), False, 49),
        ((0, 4, 6), False, 40),
        ((2, 4, 6), True, 129),
    ):
        counts = [count_flops(shape, exits, stages, sequential) for shape in (small, same)]
        assert counts[0] - counts[1] == 2 * num_tokens * 128 * 768
    with pytest.raises(ValueError, match="shorter"):
        count_flops(small, [2, 4], stages[:1])


def test_operation_cost_follows_the_layers_and_their_rounding():
    for drop in (0.0, 0.3, 0.5):
        counted = flops_of(EncoderShape(), EXITS, drop, num_candidates=1_000, tokens_per_pair=60)
        assert counted == pytest.approx(layers_of(EXITS, drop), abs=0.005)
    assert (
        flops_of(EncoderShape(), EXITS, 0.5, num_candidates=1, tokens_per_pair=60) > 1.0
    )  # never none
    again = flops_of(EncoderShape(), EXITS, 0.3, 1_000, 60, sequential=True)
    assert again == pytest.approx(layers_of(EXITS, 0.3, sequential=True), abs=0.005)


def test_cost_of_heads_is_that_of_their_layers_over_the_survivors():
    # B10_3H2: the last survivors run 10 layers of the body and 3 x 2 of the heads.
    shape = EncoderShape(num_layers=12, num_ranking_heads=3, layers_per_head=2)
    assert layers_of((10,), (), 12, num_head_layers=6) == pytest.approx(16 / 12)
    assert layers_of((4, 10), 0.5, 12, num_head_layers=6) == pytest.approx((4 + 0.5 * 12) / 12)
    for exits, drop in (((10,), ()), ((4, 10), 0.5)):
        counted = flops_of(shape, exits, drop, num_candidates=1_000, tokens_per_pair=60)
        assert counted == pytest.approx(layers_of(exits, drop, 12, num_head_layers=6), abs=0.005)


def test_drop_ratios_that_do_not_fit_the_exits_are_refused():
    with pytest.raises(ConfigError, match="drop ratios"):
        layers_of(EXITS, (0.3, 0.3))


def test_operations_of_heads_and_partial_classifiers_equal_a_count_by_hand():
    shape = EncoderShape(4, 8, 4, num_layers=4, num_ranking_heads=3, layers_per_head=1)
    lengths = [np.array([3, 5, 7]), np.array([5])]  # of the second exit, whose heads read the rest
    partial_classifier = 2 * (4 * 4 + 4 * 4 + 4 * 2)
    body = 2 * shape.layer_flops(lengths[0]).sum() + shape.layer_flops(lengths[1]).sum()
    head = shape.layer_flops(lengths[1]).sum() + 2 * (4 * 4 + 4 * 2)
    found = count_flops(shape, [2, 3], lengths)
    assert found == body + 3 * partial_classifier + 3 * head
    lengths = [lengths[0], lengths[0][:2]]  # two pairs
    more = shape.layer_flops(lengths[1]).sum() - shape.layer_flops(np.array([5])).sum()
    dense = 2 * (4 * 4 + 4 * 2)
    assert count_flops(shape, [2, 3], lengths) - found == 4 * more + 3 * dense


def test_last_layer_of_a_head_that_reads_one_token_has_a_quarter_of_the_dense_products():
    shape = EncoderShape(hidden_size=8, intermediate_size=32)
    one, many = np.ones(1), np.array([50.0])
    np.testing.assert_array_equal(shape.pooled_layer_flops(one), shape.layer_flops(one))
    attention, dense = 4 * 50 * 50 * 8, 2 * (4 * 8 * 8 + 2 * 8 * 32)
    assert shape.layer_flops(many) == 50 * dense + attention
    assert shape.pooled_layer_flops(many) == 50 * dense / 4 + attention + dense * 3 / 4


def test_sizes_are_read_from_a_configuration():
    bert = SimpleNamespace(hidden_size=32, intermediate_size=64, num_hidden_layers=6)
    assert EncoderShape.from_config(bert) == EncoderShape(32, 64, 32, 6)
    distilbert = SimpleNamespace(dim=32, hidden_dim=64, n_layers=6, embedding_size=8)
    assert EncoderShape.from_config(distilbert) == EncoderShape(32, 64, 8, 6)
    bert.as2ray = {"num_ranking_heads": 3, "layers_per_head": 2}
    heads = EncoderShape(32, 64, 32, 8, num_ranking_heads=3, layers_per_head=2)
    assert EncoderShape.from_config(bert) == heads


def test_sizes_of_a_decoder_are_those_of_its_heads():
    decoder = SimpleNamespace(
        model_type="qwen3",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    shape = EncoderShape(32, 64, 32, 6, feed_forward_products=3, query_size=32, key_size=16)
    assert EncoderShape.from_config(decoder) == shape
    decoder.head_dim = 16
    shape = EncoderShape(32, 64, 32, 6, feed_forward_products=3, query_size=64, key_size=32)
    assert EncoderShape.from_config(decoder) == shape
    products = 32 * (64 + 32 + 32 + 64) + 3 * 32 * 64  # query, key, value, output; gate, up, down
    assert shape.layer_flops(np.array([5])) == 2 * 5 * products + 4 * 25 * 64


def test_drop_ratios_are_observed_of_the_candidates_that_were_scored():
    # Two were never scored; of eight five pass the first stage, and of these one the second.
    stage_index = np.array([-1, 0, 2, 1, 0, 1, 1, 0, -1, 1])
    np.testing.assert_allclose(observed_drop_ratios(stage_index, 3), [3 / 8, 4 / 5])
    assert observed_drop_ratios(np.array([-1, 0]), 3).tolist() == [1.0, 1.0]
    assert observed_drop_ratios(np.array([-1, -1]), 2).tolist() == [1.0]


@pytest.mark.parametrize("sequential", [False, True])
def test_measured_cost_is_that_of_what_each_stage_scored(sequential):
    shape = EncoderShape(8, 16, 8, num_layers=6)
    lengths, stage_index = np.array([3, 5, 7, 9]), np.array([1, -1, 0, 1])
    drop_ratios = observed_drop_ratios(stage_index, 2)
    layers, flops = measure_relative_cost(
        shape, (2, 6), drop_ratios, lengths, stage_index, sequential
    )
    # Of four pairs three pass the first stage, and two the second, which may start anew.
    assert layers == pytest.approx((3 * 2 + 2 * (6 if sequential else 4)) / (4 * 6))
    counted = count_flops(shape, (2, 6), [lengths[[0, 2, 3]], lengths[[0, 3]]], sequential)
    assert flops == counted / count_flops(shape, [6], [lengths], sequential=True)


def test_measured_cost_counts_the_layers_of_heads():
    shape = EncoderShape(8, 16, 8, num_layers=6, num_ranking_heads=3, layers_per_head=2)
    lengths, stage_index = np.array([3, 5]), np.array([0, 0])
    layers, _ = measure_relative_cost(shape, (4,), np.empty(0), lengths, stage_index)
    assert layers == (4 + 3 * 2) / 6


def test_batches_shrink_as_kept_candidates_do():
    assert batch_sizes(128, np.full(4, 0.3)) == [128, 90, 63, 45, 32]
    assert batch_sizes(128, np.full(4, 0.3), "nearest") == [128, 90, 63, 44, 31]
    ratios = np.full(4, 0.3)
    shape = EncoderShape()
    floor, nearest = (
        relative_flops(shape, EXITS, ratios, 128, 60, rounding=r) for r in ("floor", "nearest")
    )
    assert floor == relative_flops(shape, EXITS, ratios, 128, 60) > nearest
