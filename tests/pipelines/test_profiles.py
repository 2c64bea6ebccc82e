"""Every recipe carries plans for a laptop, a node and a cluster, which a flag chooses."""

from pathlib import Path

import pytest
import yaml

from as2ray.errors import ConfigError
from as2ray.experiments.command import Pipeline
from as2ray.experiments.recipe import Recipe, read_recipe
from pipelines.transfer_adapt import PIPELINE

RECIPES = sorted(Path("pipelines/recipes").glob("*.yaml"))
TANDA = "pipelines/recipes/tanda_table3.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_has_profiles_and_only_the_cluster_s_names_shared_storage(path):
    profiles = yaml.safe_load(path.read_text())["profiles"]
    assert list(profiles) == ["laptop", "node", "cluster"]
    assert [bool(plan.get("storage_path")) for plan in profiles.values()] == [False, False, True]


def _workers(*more):
    return read_recipe(Recipe, ["--config", TANDA, "--output", "out", *more])[1].workers


def test_profile_is_the_plan_and_flags_change_it():
    assert _workers().num_workers == 1
    assert _workers("--profile", "node").num_workers == 8
    changed = _workers("--profile", "cluster", "--workers.storage_path", "/mine")
    assert (changed.num_workers, changed.min_workers, changed.storage_path) == (16, 8, "/mine")


def test_unknown_profile_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'grid'(.|\n)*'cluster', 'laptop', 'node'"):
        _workers("--profile", "grid")


def test_command_runs_with_the_workers_of_the_profile_and_the_flags(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Pipeline, "run", lambda *positional, **others: seen.append(positional[3]))
    flags = ["--config", TANDA, "--output", str(tmp_path), "--profile", "node"]
    PIPELINE.command([*flags, "--workers.cpus_per_worker", "3"])
    assert [(plan.num_workers, plan.cpus_per_worker) for plan in seen] == [(8, 3)]
