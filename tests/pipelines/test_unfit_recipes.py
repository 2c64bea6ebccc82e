"""What would end a recipe's later step, or its report, is refused before a first one is trained."""

from dataclasses import replace

import pytest

from as2ray.distributed.plan import Workers
from as2ray.errors import CheckpointError, EvaluationError, RecipeError
from as2ray.objectives import Distillation, TwoInOne
from pipelines import cascade
from pipelines.recipe import Recipe, Step
from pipelines.transfer_adapt import run

TAUGHT = {"teachers": ["first"], "objective": Distillation()}


@pytest.fixture
def recipe(common, learn):
    return Recipe(**common, steps={"first": Step(**learn)}, baseline="first", seeds=[0])


def _with(recipe: Recipe, learn: dict, **other: object) -> Recipe:
    return replace(recipe, steps={**recipe.steps, "other": Step(**learn, **other)})


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"objective": "uniform"}, "objective 'uniform'"),
        ({"objective": "uniform_exit"}, r"'other' with objective 'uniform_exit', exits \[\]"),
        ({"exits": (1, 3)}, r"objective 'cross_entropy', exits \[1, 3\]"),
        ({"exits": (1, 3), "objective": TwoInOne()}, r"exits \[1, 3\]"),
        ({"heads": 2}, "2 heads"),
        ({"teachers": ["first"]}, r"objective 'cross_entropy' and teachers \['first'\]"),
        ({"objective": Distillation()}, r"teachers \[\]"),
        ({**TAUGHT, "exits": (2,), "heads": 2}, "2 heads and 1 teachers"),
        ({**TAUGHT, "objective": Distillation(teacher=1)}, "teacher 1 of 1"),
        ({**TAUGHT, "objective": Distillation(weights=(1.0, 1.0))}, "2 weights for 1 heads"),
        ({"start": "first", "model": "bert-base-uncased"}, "from step 'first' and from 'bert"),
    ],
)
def test_step_whose_objective_and_model_do_not_go_together_is_refused(recipe, learn, other, match):
    with pytest.raises(RecipeError, match=match):
        _with(recipe, learn, **other)


def test_step_that_goes_on_with_a_cascade_or_with_heads_has_its_exits_and_heads(recipe, learn):
    taught = {**TAUGHT, "objective": Distillation(lesson="sum")}
    start = {"exits": (2,), "heads": 2, "objective": "every_exit"}
    made = _with(recipe, learn, **start)
    again = Step(**learn, start="other", objective="every_exit")
    made = replace(made, steps={**made.steps, "again": again})
    replace(made, steps={**made.steps, "taught": Step(**learn, start="again", **taught)})
    with pytest.raises(RecipeError, match="2 heads and 1 teachers"):
        replace(made, steps={**made.steps, "taught": Step(**learn, start="again", **TAUGHT)})


@pytest.mark.parametrize(
    ("other", "kind", "match"),
    [
        ({"layers": 4}, RecipeError, "'other' with 4 layers of an encoder that has 3"),
        ({"start": "first", "layers": 4}, RecipeError, "4 layers of an encoder that has 3"),
        ({"exits": (1, 4), "objective": "uniform_exit"}, RecipeError, "encoder of 3 layers"),
        ({"exits": (3, 1), "objective": "uniform_exit"}, RecipeError, "ascending"),
        ({"model": "no/such folder"}, CheckpointError, "no/such folder"),
        ({"objective": TwoInOne()}, RecipeError, "two_in_one"),
    ],
)
def test_model_that_a_later_step_cannot_start_from_is_refused_before_anything_is_trained(
    recipe, learn, tmp_path, other, kind, match
):
    with pytest.raises(kind, match=match):
        run(_with(recipe, learn, **other), tmp_path, Workers(count=0))
    assert not (tmp_path / "rankers").exists()


def test_measure_that_nothing_computes_is_refused(recipe):
    with pytest.raises(EvaluationError, match="MAPP"):
        replace(recipe, measures=["AP", "MAPP"])


def test_drop_ratio_to_report_out_of_range_is_refused(common, learn):
    steps = {"cascade": Step(**learn, exits=(1, 3), objective="uniform_exit")}
    given = {**common, "steps": steps, "baseline": "cascade, exit 1", "seeds": [0]}
    with pytest.raises(RecipeError, match=r"drop ratios \[1.0\]"):
        cascade.Recipe(**given, drops=[0.0, 1.0])
