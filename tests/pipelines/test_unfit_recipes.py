"""What would end a recipe's later step, or its report, is refused before a first one is trained."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from as2ray.distributed.plan import Workers
from as2ray.errors import CheckpointError, EvaluationError, RecipeError, StageMismatchError
from as2ray.evaluation.selection import Selecting
from as2ray.objectives import Distillation, Listwise, TwoInOne
from pipelines import cascade, distill
from pipelines.drop_search import Search
from pipelines.recipe import Data, Recipe, Step
from pipelines.steps import prepared
from pipelines.transfer_adapt import run

CASCADE = {"exits": (1, 3), "objective": "uniform_exit"}
TAUGHT = {"teachers": ["first"], "objective": Distillation()}


@pytest.fixture
def recipe(common, learn):
    return Recipe(**common, steps={"first": Step(**learn)}, baseline="first", seeds=[0])


def _with(recipe: Recipe, learn: dict, **other: object) -> Recipe:
    return replace(recipe, steps={**recipe.steps, "other": Step(**learn, **other)})


def _run_with(recipe: Recipe, step: Step, folder: Path) -> None:
    changed = replace(recipe, steps={**recipe.steps, "again": step})
    run(changed, folder, Workers(count=0))


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
        ({"objective": Listwise(300)}, "max_tokens 8,192"),
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
        ({"layers": 4}, RecipeError, "'other' with layers 4.* an encoder of 3 layers"),
        ({"layers": 0}, RecipeError, "layers 0"),
        ({"start": "first", "layers": 4}, RecipeError, "layers 4.* an encoder of 3 layers"),
        ({"start": "first", **CASCADE, "exits": (3,), "heads": 2}, RecipeError, "2 heads"),
        ({"exits": ()}, RecipeError, r"exits \[\]"),
        ({**CASCADE, "exits": (1, 4)}, RecipeError, "encoder of 3 layers"),
        ({**CASCADE, "exits": (3, 1)}, RecipeError, "ascending"),
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


@pytest.mark.parametrize(
    "other",
    [{"layers": 2}, {"exits": (1, 2)}, {"heads": 2}, {"objective": TwoInOne(), "exits": None}],
)
def test_step_that_starts_from_a_cascade_and_changes_it_is_refused(recipe, learn, tmp_path, other):
    made = _with(recipe, learn, **CASCADE)
    again = Step(**learn, **{"start": "other", "objective": "uniform_exit", **other})
    with pytest.raises(RecipeError):
        _run_with(made, again, tmp_path)
    assert not (tmp_path / "rankers").exists()


def test_finished_steps_need_the_model_they_started_from_no_more(recipe, learn, tmp_path):
    gone = tmp_path / "encoder"
    shutil.copytree(recipe.model.path, gone)
    recipe = replace(recipe, model=replace(recipe.model, path=str(gone)))
    run(recipe, tmp_path / "out", Workers(count=0))
    shutil.rmtree(gone)
    (tmp_path / "out" / "test.md").unlink()
    run(recipe, tmp_path / "out", Workers(count=0))
    assert (tmp_path / "out" / "test.md").is_file()


@pytest.mark.parametrize("train", [["target", "target"], [], ["test"], ["target", "dev"]])
def test_step_that_trains_twice_on_a_table_on_none_or_on_a_held_out_one_is_refused(
    recipe, learn, train
):
    with pytest.raises(RecipeError, match="'other' trains on"):
        _with(recipe, {**learn, "train": train})


def test_table_that_is_trained_on_and_called_dev_beside_another_dev_is_refused(recipe, learn):
    with pytest.raises(RecipeError, match="'first' trains on"):
        replace(recipe, steps={"first": Step(**{**learn, "train": ["dev"]})}, dev="test")


def test_leak_of_a_table_that_no_step_trains_on_does_not_matter(recipe, tmp_path):
    tables = {**recipe.tables, "again": Data("wikiqa", "test")}
    run(replace(recipe, tables=tables), tmp_path, Workers(count=0))


@pytest.mark.parametrize("size", [{"questions": 0}, {"negatives": -1}, {"seed": -1}, {"noise": 2}])
def test_table_of_an_impossible_size_is_refused(size):
    with pytest.raises(RecipeError, match="'wikiqa' with"):
        Data("wikiqa", "train", **size)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"tables": {"wikiqa/test": Data("wikiqa", "test")}}, "table named 'wikiqa/test'"),
        ({"measures": []}, r"measures \[\]"),
        ({"tests": []}, r"reports of \[\]"),
        ({"seeds": [0, -1]}, r"seeds \[0, -1\]"),
        ({"published": {"tset": {}}}, r"published numbers of \['tset'\]"),
    ],
)
def test_names_and_lists_that_would_fail_at_the_report_are_refused(recipe, wrong, match):
    if "tables" in wrong:
        wrong = {"tables": recipe.tables | wrong["tables"]}
    with pytest.raises(RecipeError, match=match):
        replace(recipe, **wrong)


def test_sequential_ranker_that_does_not_grow_is_refused_before_anything_is_trained(
    common, learn, tmp_path
):
    steps = {"deep": Step(**learn), "shallow": Step(layers=1, **learn)}
    given = {**common, "steps": steps, "baseline": "deep", "seeds": [0]}
    with pytest.raises(RecipeError, match=r"'s' of .*'deep': 3, 'shallow': 1"):
        cascade.run(
            cascade.Recipe(**given, sequential={"s": ["deep", "shallow"]}),
            tmp_path,
            Workers(count=0),
        )
    with pytest.raises(RecipeError, match="sequential ranker named 'a b'"):
        cascade.Recipe(**given, sequential={"a b": ["shallow", "deep"]})


@pytest.mark.parametrize("wrong", [{"trials": -1}, {"ensembles": {"a b": ["first"]}}])
def test_searches_and_names_of_distillation_are_in_range(recipe, wrong):
    with pytest.raises(RecipeError):
        distill.Recipe(**{**vars(recipe), **wrong})
    with pytest.raises(RecipeError):
        Search(trials=-1)
    with pytest.raises(RecipeError):
        Selecting(top=0)


def test_release_that_changed_under_a_prepared_table_is_told(recipe, tmp_path, monkeypatch):
    root = tmp_path / "data"
    shutil.copytree(os.environ["AS2RAY_DATA"], root)
    monkeypatch.setenv("AS2RAY_DATA", str(root))
    made = prepared(tmp_path / "table", recipe.tables["test"])
    assert prepared(tmp_path / "table", recipe.tables["test"]) == made
    path = root / "wikiqa" / "WikiQA-test.tsv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    with pytest.raises(StageMismatchError, match=r"WikiQA-test\.tsv"):
        prepared(tmp_path / "table", recipe.tables["test"])
    shutil.rmtree(root)
    assert prepared(tmp_path / "table", recipe.tables["test"]) == made


def test_measure_that_nothing_computes_is_refused(recipe):
    with pytest.raises(EvaluationError, match="MAPP"):
        replace(recipe, measures=["AP", "MAPP"])


def test_drop_ratio_to_report_out_of_range_is_refused(common, learn):
    steps = {"cascade": Step(**learn, exits=(1, 3), objective="uniform_exit")}
    given = {**common, "steps": steps, "baseline": "cascade, exit 1", "seeds": [0]}
    with pytest.raises(RecipeError, match=r"drop ratios \[1.0\]"):
        cascade.Recipe(**given, drops=[0.0, 1.0])
