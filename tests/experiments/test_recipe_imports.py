"""A recipe becomes a graph with sizes and hours without what only runs need."""

import subprocess
import sys

HEAVY = {"torch", "transformers", "ray", "bm25s", "scipy", "statsmodels", "matplotlib"}

CODE = f"""
import sys

def check_loaded(step):
    loaded = {HEAVY} & sys.modules.keys()
    assert not loaded, f"{{loaded}} after {{step}}"

from as2ray.experiments.recipe import Recipe, read_recipe
recipe, _ = read_recipe(
    Recipe, ["--config", "pipelines/recipes/cerberus_teachers.yaml", "--output", "-"]
)
check_loaded("reading a recipe")
from pipelines import transfer_adapt
experiment = transfer_adapt.build(recipe, {{}})
check_loaded("building its graph")
assert all(stage.hours() for stage in experiment.targets)
from as2ray.experiments.cost_model import describe_source
assert describe_source(recipe.tables["asnq"], None)["license"]
check_loaded("estimating its cost")
"""


def test_recipe_its_graph_and_its_cost_load_neither_torch_nor_ray():
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
