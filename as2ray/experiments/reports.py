"""Reports of an experiment: a table and a chart of each test, and learning curves."""

import logging

import numpy as np

from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.experiment import Evaluations, Finished
from as2ray.experiments.recipe import Recipe
from as2ray.training.tracking import METRICS, read_metrics

LOGGED_MEASURES = {"AP", "RR", "P@1", "nDCG@10"}
"""Measures of every evaluation during training."""

log = logging.getLogger(__name__)


def write_reports(
    recipe: Recipe, finished: Finished, evaluations: Evaluations | None = None
) -> None:
    """Writes a report and a bar chart of each test whose baseline is complete.

    Args:
        recipe: Its title, baselines and published results.
        finished: What is complete.
        evaluations: The evaluations to report; by default all of the experiment's.
    """
    from as2ray.evaluation import plots

    evaluations = finished.evaluations() if evaluations is None else evaluations
    for test, systems in evaluations.items():
        baseline = str(recipe.against(test))
        if baseline not in systems:
            log.warning("no report of %s: its baseline %r is not complete", test, baseline)
            continue
        title, published = f"{recipe.title}: {test}", recipe.published_results.get(test)
        report = build_report(
            title,
            systems,
            baseline=baseline,
            published_results=published,
            parameters=finished.parameters(test),
        )
        save_report(report, finished.output / f"{test}.md")
        log.info("\n%s", to_markdown(report))
        measures = {row.system: row.measures for row in report.rows}
        plots.bar_chart(measures, title, "mean over questions", finished.output / f"{test}.png")
        if recipe.plot_learning_curves:
            for measure in sorted(LOGGED_MEASURES & {*recipe.measures, "AP"}):
                _plot_learning_curve(recipe, finished, test, measure)


def _plot_learning_curve(recipe: Recipe, finished: Finished, test: str, measure: str) -> None:
    """Plots a measure over epochs, and logs its mean change between epochs (TANDA, Figure 4)."""
    from as2ray.evaluation import plots

    series: dict[str, list[tuple[float, float]]] = {}
    changes: dict[str, list[float]] = {}
    for name, stage in finished.named("rankers/").items():
        run = name.rpartition("-seed")[0]
        lines = read_metrics(finished.path(stage) / METRICS)
        key = f"{test}/{measure}"
        points = [(x["epoch"], x[key]) for x in lines if key in x]
        series.setdefault(run, []).extend(points)
        changes.setdefault(run, []).extend(np.abs(np.diff([y for _, y in points])).tolist())
    path = finished.output / f"{test}-curve{'' if measure == 'AP' else f'-{measure}'}.png"
    plots.learning_curve(series, f"{recipe.title}: {test}", "epoch", measure, path)
    for run, sizes in changes.items():
        if sizes:
            mean_change = float(np.mean(sizes))
            log.info("%s, %s: %s changes by %.4f between epochs", test, run, measure, mean_change)
