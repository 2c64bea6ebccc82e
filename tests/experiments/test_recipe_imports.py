"""A recipe becomes a graph with sizes and hours without what only runs need."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "ray", "matplotlib", "bm25s", "scipy"}
RECIPES = {
    "transfer_adapt": ("tanda_table3", HEAVY),
    "cascade": ("cascade_table2", HEAVY),
    "distill": ("cerberus_table2", HEAVY),
    "two_in_one": ("two_in_one_table1", HEAVY),
    "pseudo_label": ("pseudo_label_wikiqa", HEAVY - {"bm25s", "scipy"}),
}
"""A recipe of each pipeline, and what must not be loaded."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_its_graph_and_its_cost_load_neither_torch_nor_ray(name):
    recipe, not_loaded = RECIPES[name]
    code = f"""
import sys

def check_loaded(step, not_loaded={HEAVY}):
    loaded = not_loaded & sys.modules.keys()
    assert not loaded, f"{{loaded}} after {{step}}"

from as2ray.experiments.recipe import read_recipe
check_loaded("loading recipes")
from as2ray.experiments.cost_model import describe_source
from as2ray.experiments.stage import sorted_stages
from as2ray.experiments.tables import PreparedTable
check_loaded("loading the cost model")
from pipelines.{name} import PIPELINE
path = "pipelines/recipes/{recipe}.yaml"
recipe, _ = read_recipe(PIPELINE.recipe_type, ["--config", path, "--output", "-"])
experiment = PIPELINE.build(recipe, {{}})
assert sum(stage.hours() for stage in experiment.targets) > 0
tables = [s for s in sorted_stages(experiment.targets) if isinstance(s, PreparedTable)]
assert tables and all(describe_source(s.spec, s.data_dir)["license"] for s in tables)
check_loaded("estimating costs", {not_loaded})
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
