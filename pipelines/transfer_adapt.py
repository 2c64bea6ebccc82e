"""Transfer and adapt (TANDA): trains runs that build on each other, and reports every one.

    python -m pipelines.transfer_adapt --config pipelines/recipes/tanda_minilm.yaml --output DIR

A run starts from the model, or from an earlier run: transfer, then adapt. Tables 3 to 7 and
Figure 4 of the paper are recipes.
"""

from collections.abc import Mapping

from as2ray.experiments.command import Pipeline
from as2ray.experiments.comparison import start_experiment
from as2ray.experiments.experiment import Experiment
from as2ray.experiments.rankers import evaluation, trained_rankers
from as2ray.experiments.recipe import Recipe
from as2ray.experiments.reports import write_reports
from as2ray.experiments.tables import leak_checks


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: tables, rankers, and each ranker's evaluation on each test."""
    experiment, tables = start_experiment(recipe, data_dirs)
    rankers = trained_rankers(recipe, tables, leak_checks(recipe, tables))
    for (name, seed), ranker in rankers.items():
        experiment.add(f"rankers/{name}-seed{seed}", ranker)
        for test in recipe.tests:
            stage = evaluation(recipe, ranker, tables[test])
            experiment.add(f"evaluations/{name}-seed{seed}-{test}", stage)
            experiment.compare(test, name, seed, stage)
    return experiment


PIPELINE = Pipeline(Recipe, build, write_reports)

if __name__ == "__main__":
    PIPELINE.command()
