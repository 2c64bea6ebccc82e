"""Transfer and adapt (TANDA): trains runs that start from each other, and reports all of them.

    python -m pipelines.transfer_adapt --config pipelines/recipes/tanda_minilm.yaml --output DIR

Every run is a system of the results table. A run starts from the model, or from an earlier run:
transfer, then adapt. Tables 3 to 7 and Figure 4 of the paper are recipes, and so are the teachers
of CERBERUS (`cerberus_teachers.yaml`).
"""

from collections.abc import Mapping
from pathlib import Path

from as2ray.distributed.workers_config import WorkersConfig
from pipelines.experiment import Found, prepare, train_runs, write_reports
from pipelines.recipe import Recipe, command
from pipelines.steps import evaluate_ranker


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Trains and evaluates what does not exist yet, and writes the reports.

    Args:
        recipe: Tables, runs and systems.
        output: Folder of the stages.
        workers: Part of the cluster to use.
        data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.
    """
    folder = Path(output).resolve()
    tables = prepare(recipe, folder / "tables", data_dirs or {})
    results: Found = {test: {} for test in recipe.tests}
    for name, seed, stage in train_runs(recipe, folder, workers, tables):
        tests = {test: tables[test] for test in recipe.tests}
        runs = folder / "runs" / stage.name
        evaluations = evaluate_ranker(runs, stage, tests, recipe.measures, recipe.question_filter)
        for test, evaluation in evaluations.items():
            results[test].setdefault(name, {})[seed] = evaluation
    write_reports(recipe, folder, results)


def main() -> None:
    """Runs the command line."""
    command(Recipe, run)


if __name__ == "__main__":
    main()
