from types import SimpleNamespace

import pytest

from as2ray.cascade.ranker_shape import RankerShape, check_exit_layers, check_model_spec
from as2ray.errors import ConfigError
from as2ray.training.job import ModelSpec

CASCADE = RankerShape(4, (2, 4), 3)
OPTIONS = {"exit_layers": None, "num_ranking_heads": 0}
JOINT = RankerShape(6, is_joint=True, extract_answers=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, RankerShape(6)),
        ({"num_layers": 4}, RankerShape(4)),
        ({"exit_layers": (2, 4)}, RankerShape(4, (2, 4))),
        ({"exit_layers": (4,), "num_ranking_heads": 3}, RankerShape(4, (4,), 3)),
    ],
)
def test_check_model_spec_returns_the_shape_of_the_ranker(options, expected):
    assert check_model_spec(ModelSpec("path", **options), 6) == expected
    assert check_model_spec(ModelSpec("path", **options), 6, RankerShape(6)) == expected
    # A ranker that is trained from this one can keep its shape.
    assert check_model_spec(ModelSpec("path"), expected.num_layers, expected) == expected


def test_check_model_spec_of_a_path_allows_heads_after_the_last_layer():
    # The encoder of a checkpoint with ranking heads ends at its last exit.
    spec = ModelSpec("path", exit_layers=(6,), num_ranking_heads=3)
    assert check_model_spec(spec, 6).num_ranking_heads == 3
    with pytest.raises(ConfigError, match="needs layers above the last exit"):
        check_model_spec(spec, 6, RankerShape(6))


@pytest.mark.parametrize("exits", [(), (0, 2), (2, 2), (3, 2), (2, 7), (7,)])
def test_exits_that_are_not_ascending_layers_are_refused(exits):
    with pytest.raises(ConfigError, match="not ascending numbers from 1 to the 6 layers"):
        check_exit_layers(exits, 6)
    spec = SimpleNamespace(**OPTIONS | {"exit_layers": exits}, num_layers=None)
    with pytest.raises(ConfigError, match="not ascending"):
        check_model_spec(spec, 6)


@pytest.mark.parametrize("exits", [(1,), (6,), (1, 6), (1, 2, 3, 4, 5, 6)])
def test_all_layers_can_be_exits(exits):
    check_exit_layers(exits, 6)


@pytest.mark.parametrize("num_layers", [0, 7])
def test_number_of_layers_is_one_of_the_encoder(num_layers):
    with pytest.raises(ConfigError, match=f"num_layers={num_layers} is not from 1 to 6"):
        check_model_spec(SimpleNamespace(**OPTIONS, num_layers=num_layers), 6)
    for bound in (1, 6):
        assert check_model_spec(ModelSpec("path", num_layers=bound), 6) == RankerShape(bound)


def test_exits_are_layers_that_are_kept():
    with pytest.raises(ConfigError, match="to the 4 layers"):
        check_model_spec(ModelSpec("path", num_layers=4, exit_layers=(2, 5)), 6)


@pytest.mark.parametrize(
    ("options", "is_joint", "message"),
    [
        ({}, False, "extract_answers=True needs a joint model"),
        ({"exit_layers": (2, 4)}, True, r"a joint model has no exits, but exit_layers=\[2, 4\]"),
        ({"num_ranking_heads": 3}, True, "num_ranking_heads=3 needs exit_layers"),
    ],
)
def test_joint_models_have_neither_exits_nor_ranking_heads(options, is_joint, message):
    with pytest.raises(ConfigError, match=message):
        check_model_spec(ModelSpec("path", **options), 6, is_joint=is_joint, extract_answers=True)
    for answers in (True, False):
        shape = check_model_spec(ModelSpec("path"), 6, is_joint=True, extract_answers=answers)
        assert shape == RankerShape(6, is_joint=True, extract_answers=answers)


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 4},
        {"exit_layers": (4,)},
        {"num_ranking_heads": 2},
        {"num_layers": 4, "exit_layers": (2, 4), "num_ranking_heads": 3},
    ],
)
def test_cascade_keeps_its_shape(options):
    with pytest.raises(ConfigError, match="would change an encoder of 4 layers, exits"):
        check_model_spec(ModelSpec("path", **options), 4, CASCADE)
    for same in ({}, {"exit_layers": [2, 4]}, {"num_ranking_heads": 3}):
        assert check_model_spec(ModelSpec("path", **same), 4, CASCADE) is CASCADE
    with pytest.raises(ConfigError, match="would change"):
        check_model_spec(ModelSpec("path"), 4, CASCADE, is_joint=True)


def test_joint_model_stays_one_and_need_not_extract_answers():
    for extract_answers in (True, False):
        options = {"is_joint": True, "extract_answers": extract_answers}
        assert check_model_spec(ModelSpec("path"), 6, JOINT, **options) is JOINT
    with pytest.raises(ConfigError, match="would change a joint model"):
        check_model_spec(ModelSpec("path"), 6, JOINT)
    with pytest.raises(ConfigError, match="would change"):
        check_model_spec(
            ModelSpec("path"), 6, RankerShape(6, is_joint=True), is_joint=True, extract_answers=True
        )


def test_shape_in_words():
    assert str(CASCADE) == "an encoder of 4 layers, exits [2, 4], 3 ranking heads"
    assert str(JOINT) == "a joint model of 6 layers, 0 ranking heads"
