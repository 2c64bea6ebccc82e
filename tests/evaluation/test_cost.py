import numpy as np
import pytest

from as2ray.errors import RecipeError
from as2ray.evaluation.cost import Shape, layer_cost, operation_cost, operations

EXITS = (4, 6, 8, 10, 12)


@pytest.mark.parametrize(("drop", "saved"), [(0.3, 37), (0.4, 45), (0.5, 51)])
def test_layer_cost_of_the_cascade_is_the_paper_s(drop, saved):
    assert round(100 * (1 - layer_cost(EXITS, drop))) == saved


@pytest.mark.parametrize(("drop", "more"), [(0.3, 54), (0.4, 18), (0.5, -8)])
def test_layer_cost_of_the_sequential_ranker_is_the_paper_s(drop, more):
    # The paper prints +53 and -10 where its own formula gives +53.6 and -8.3.
    assert round(100 * (layer_cost(EXITS, drop, sequential=True) - 1)) == more


def test_layer_cost_with_nothing_dropped_is_that_of_the_layers():
    assert layer_cost(EXITS, 0.0) == 1.0
    assert layer_cost((4,), 0.0, layers=12) == pytest.approx(1 / 3)
    assert layer_cost((2, 4), (0.5,), layers=4) == pytest.approx(0.75)


def test_operations_of_a_layer_equal_a_count_by_hand():
    shape, tokens = Shape(hidden=4, intermediate=8, embedding=4, layers=1), np.array([3, 5])
    products = 4 * 4 * 4 + 2 * 4 * 8  # query, key, value, output; up, down
    attention = 2 * (9 + 25) * 4 * 2  # scores and weighted sum
    head = 2 * 2 * (4 * 4 + 4 * 2)
    assert operations(shape, [1], [tokens], sequential=True) == 2 * 8 * products + attention + head


def test_operations_count_the_projection_of_small_embeddings():
    same, small = Shape(embedding=768), Shape(embedding=128)
    tokens = np.array([40])
    more = operations(small, [12], [tokens]) - operations(same, [12], [tokens])
    assert more == 2 * 40 * 128 * 768


def test_operation_cost_follows_the_layers_and_their_rounding():
    for drop in (0.0, 0.3, 0.5):
        counted = operation_cost(Shape(), EXITS, drop, candidates=1_000, tokens=60)
        assert counted == pytest.approx(layer_cost(EXITS, drop), abs=0.005)
    assert operation_cost(Shape(), EXITS, 0.5, candidates=1, tokens=60) > 1.0  # never none
    again = operation_cost(Shape(), EXITS, 0.3, 1_000, 60, sequential=True)
    assert again == pytest.approx(layer_cost(EXITS, 0.3, sequential=True), abs=0.005)


def test_cost_of_heads_is_that_of_their_layers_over_the_survivors():
    # B10_3H2: the last survivors run 10 layers of the body and 3 x 2 of the heads.
    shape = Shape(layers=12, heads=3, head_layers=2)
    assert layer_cost((10,), (), 12, heads=6) == pytest.approx(16 / 12)
    assert layer_cost((4, 10), 0.5, 12, heads=6) == pytest.approx((4 + 0.5 * 12) / 12)
    for exits, drop in (((10,), ()), ((4, 10), 0.5)):
        counted = operation_cost(shape, exits, drop, candidates=1_000, tokens=60)
        assert counted == pytest.approx(layer_cost(exits, drop, 12, heads=6), abs=0.005)


def test_drop_ratios_that_do_not_fit_the_exits_are_refused():
    with pytest.raises(RecipeError, match="drop ratios"):
        layer_cost(EXITS, (0.3, 0.3))
