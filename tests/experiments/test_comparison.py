"""Rankers that are made of a recipe's runs, and the tables with which its graph starts."""

import pytest

from as2ray.errors import ConfigError
from as2ray.experiments.comparison import check_members, start_experiment
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec
from as2ray.training.job import ModelSpec


@pytest.fixture
def recipe():
    runs = {"first": None, "second": [0], "third": [1]}
    return Recipe(
        title="Members",
        model=ModelSpec("bert-base-uncased"),
        tables={name: TableSpec("wikiqa", name) for name in ("train", "dev", "test")},
        dev="dev",
        tests=["test"],
        runs={name: RunSpec(train=["train"], seeds=seeds) for name, seeds in runs.items()},
        baseline="first",
        seeds=[0, 1],
    )


@pytest.mark.parametrize(
    ("rankers", "problem"),
    [
        ({"a b": ["first"]}, "the ensemble name 'a b'"),
        ({"second": ["first"]}, "ensemble 'second' has the name of a run"),
        ({"both": []}, r"ensemble 'both' of \[\]: it needs members"),
        ({"both": ["first", "third"]}, r"members among the runs \['first', 'second'\]"),
        ({"good": ["first"], "both": ["first", "fourth"]}, "ensemble 'both' of .*'fourth'"),
    ],
)
def test_ranker_of_runs_needs_a_name_of_its_own_and_members_that_may_be(recipe, rankers, problem):
    with pytest.raises(ConfigError, match=problem):
        check_members(recipe, "ensemble", rankers, ["first", "second"])


def test_ranker_of_runs_needs_a_seed_that_all_of_them_have(recipe):
    with pytest.raises(ConfigError, match="'both' is made of runs that share no seed"):
        check_members(recipe, "ensemble", {"both": ["second", "third"]}, recipe.runs)
    check_members(recipe, "ensemble", {"both": ["first", "third"], "one": ["second"]}, recipe.runs)


def test_graph_starts_with_the_tables_of_the_recipe_in_their_folders(recipe, tmp_path):
    experiment, tables = start_experiment(recipe, {"wikiqa": str(tmp_path)})
    assert experiment.stages == {f"tables/{name}": table for name, table in tables.items()}
    assert tables.keys() == recipe.tables.keys()
    assert {table.data_dir for table in tables.values()} == {str(tmp_path)}
