"""Transfer and adapt (TANDA): trains runs that build on each other, and reports every one.

    python -m pipelines.transfer_adapt --config pipelines/recipes/tanda_minilm.yaml --output DIR

A run starts from the model, or from an earlier run: transfer, then adapt. Tables 3 to 7 and
Figure 4 of the paper are recipes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.report import markdown_table
from as2ray.experiments.command import Pipeline
from as2ray.experiments.comparison import start_experiment
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import evaluation, trained_rankers
from as2ray.experiments.recipe import Recipe, RunSpec
from as2ray.experiments.reports import write_reports
from as2ray.experiments.tables import table_checks


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: tables, rankers, and each ranker's evaluation on each test."""
    experiment, tables = start_experiment(recipe, data_dirs)
    rankers = trained_rankers(recipe, tables, table_checks(recipe, tables))
    for (name, seed), ranker in rankers.items():
        experiment.add(f"rankers/{name}-seed{seed}", ranker)
        for test in recipe.tests:
            stage = evaluation(recipe, ranker, tables[test])
            experiment.add(f"evaluations/{name}-seed{seed}-{test}", stage)
            experiment.compare(test, name, seed, stage)
    return experiment


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the reports, and what label noise costs beside what is printed (TANDA, Table 5)."""
    write_reports(recipe, finished)
    for test, systems in finished.evaluations().items():
        means = {
            name: _means(by_seed.values(), recipe.measures) for name, by_seed in systems.items()
        }
        published = recipe.published_results.get(test, {})
        printed = {run: published[name] for run, name in recipe.reproduces.get(test, {}).items()}
        printed_measures = [m for m in recipe.measures if any(m in v for v in printed.values())]
        rows = [
            (
                *(name, clean),
                *_format_drops(means, name, clean, recipe.measures),
                *_format_drops(printed, name, clean, printed_measures),
            )
            for name, clean in _runs_without_noise(recipe).items()
            if {name, clean} <= means.keys()
        ]
        if rows:
            columns = (
                *("run", "without noise", *(f"{measure} drop" for measure in recipe.measures)),
                *(f"{measure} drop as printed" for measure in printed_measures),
            )
            finished.write(f"{test}-noise.md", markdown_table(columns, rows))


def _means(results: Iterable[EvaluationResult], measures: Sequence[str]) -> dict[str, float]:
    """Returns the means over the seeds, by measure."""
    results = list(results)
    return {m: float(np.mean([result.measures[m] for result in results])) for m in measures}


def _format_drops(
    values: Mapping[str, Mapping[str, float]], noisy: str, clean: str, measures: Iterable[str]
) -> list[str]:
    """Returns the share of each measure that noise takes; "" where a value is missing or 0."""
    after, before = values.get(noisy, {}), values.get(clean, {})
    return [
        f"{1 - after[m] / before[m]:.2%}" if m in after and before.get(m) else "" for m in measures
    ]


def _runs_without_noise(recipe: Recipe) -> dict[str, str]:
    """Returns for each run on flipped labels the run that is equal without them."""

    def described(run: RunSpec) -> RunSpec:
        return replace(
            run, train=[repr(replace(recipe.tables[t], label_noise=0)) for t in run.train]
        )

    noise = {n: any(recipe.tables[t].label_noise for t in r.train) for n, r in recipe.runs.items()}
    clean = {name: described(run) for name, run in recipe.runs.items() if not noise[name]}
    return {
        name: other
        for name, run in recipe.runs.items()
        for other in clean
        if noise[name] and described(run) == clean[other]
    }


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
