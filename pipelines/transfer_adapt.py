"""Transfer and adapt (TANDA): prepare tables, train steps that build on each other, report.

    python -m pipelines.transfer_adapt --config pipelines/recipes/tanda_minilm.yaml --output DIR

Every step is a system of the results table. A step starts from the model, or from an earlier
step: transfer, then adapt. Tables 3 to 7 and Figure 4 of the paper are recipes.
"""

from collections.abc import Mapping
from pathlib import Path

from as2ray.distributed.plan import WorkersConfig
from pipelines.experiment import Found, prepare, train_runs, write_reports
from pipelines.recipe import Recipe, command
from pipelines.steps import evaluate_ranker


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Runs what is not there yet, and writes the report.

    Args:
        recipe: What to do.
        output: Folder of the stages.
        workers: What to take of the cluster.
        sources: For each corpus its folder; by default its place in AS2RAY_DATA.
    """
    folder = Path(output).resolve()
    tables = prepare(recipe, folder / "tables", data_dirs or {})
    found: Found = {test: {} for test in recipe.tests}
    for name, seed, stage in train_runs(recipe, folder, workers, tables):
        tests = {test: tables[test] for test in recipe.tests}
        runs = folder / "runs" / stage.name
        evaluations = evaluate_ranker(runs, stage, tests, recipe.measures, recipe.question_filter)
        for test, evaluation in evaluations.items():
            found[test].setdefault(name, {})[seed] = evaluation
    write_reports(recipe, folder, found)


def main() -> None:
    """The command line."""
    command(Recipe, run)


if __name__ == "__main__":
    main()
