"""Reports of an experiment: a table and a chart of each test, and learning curves."""

import logging

import numpy as np

from as2ray.evaluation.report import (
    Report,
    build_report,
    markdown_table,
    save_report,
    to_markdown,
    to_summary,
)
from as2ray.experiments.experiment import Evaluations, Finished
from as2ray.experiments.recipe import Recipe
from as2ray.progress import result
from as2ray.training.config import SELECTION_METRIC
from as2ray.training.tracking import METRICS, read_metrics

LOGGED_MEASURES = {"AP", "RR", "P@1", "nDCG@10"}
"""Measures of every evaluation during training."""

CLOSE_DEV_MAP = 0.005
"""Distance to the best dev MAP within which two checkpoints are close (TANDA, section 5.4)."""

log = logging.getLogger(__name__)


def write_reports(
    recipe: Recipe,
    finished: Finished,
    evaluations: Evaluations | None = None,
    *,
    is_shown: bool = True,
) -> dict[str, Report]:
    """Writes a report and a bar chart of each test whose baseline is complete.

    Args:
        recipe: Its title, baselines and published results.
        finished: What is complete.
        evaluations: The evaluations to report; by default all of the experiment's.
        is_shown: Whether the console gets the short form of each report.

    Returns:
        The report of each test that has one.
    """
    from as2ray.evaluation import plots

    reports = {}
    evaluations = finished.evaluations() if evaluations is None else evaluations
    for test, systems in evaluations.items():
        baseline = str(recipe.against(test))
        if baseline not in systems:
            log.warning("no report of %s: its baseline %r is not complete", test, baseline)
            continue
        title, published = f"{recipe.title}: {test}", recipe.published_results.get(test)
        reports[test] = report = build_report(
            title,
            systems,
            baseline=baseline,
            published_results=published,
            parameters=finished.parameters(test),
            reproduces=recipe.reproduces.get(test),
        )
        path = finished.output / f"{test}.md"
        save_report(report, path)
        if is_shown:
            log.info("\n%s", to_summary(report, path), extra=result(f"\n{to_markdown(report)}"))
        measures = {row.system: row.measures for row in report.rows}
        plots.bar_chart(measures, title, "mean over questions", finished.output / f"{test}.png")
        if recipe.plot_learning_curves:
            for measure in sorted(LOGGED_MEASURES & {*recipe.measures, "AP"}):
                _plot_learning_curve(recipe, finished, test, measure)
    return reports


def _plot_learning_curve(recipe: Recipe, finished: Finished, test: str, measure: str) -> None:
    """Plots a measure over epochs, and writes how stable it is (TANDA, Figure 4, section 5.4)."""
    from as2ray.evaluation import plots

    series: dict[str, list[tuple[float, float]]] = {}
    rows, key = [], f"{test}/{measure}"
    for name, stage in finished.named("rankers/").items():
        lines = [x for x in read_metrics(finished.path(stage) / METRICS) if key in x]
        values = np.array([line[key] for line in lines])
        series.setdefault(name.rpartition("-seed")[0], []).extend(
            zip([line["epoch"] for line in lines], values.tolist())
        )
        if len(values) > 1:
            dev = np.array([line[SELECTION_METRIC] for line in lines])
            close = values[dev >= dev.max() - CLOSE_DEV_MAP]
            shares = [line.get(f"{test}/share_predicted_positive") for line in lines]
            num_constant = sum(share in (0.0, 1.0) for share in shares)
            change = np.abs(np.diff(values)).mean()
            numbers = (f"{change:.4f}", f"{np.ptp(close):.4f}", str(len(close)), str(num_constant))
            rows.append((name, *numbers))
    suffix = "" if measure == "AP" else f"-{measure}"
    path = finished.output / f"{test}-curve{suffix}.png"
    plots.learning_curve(series, f"{recipe.title}: {test}", "epoch", measure, path)
    columns = (
        *("run", "mean change between evaluations"),
        *(f"range where dev MAP is within {CLOSE_DEV_MAP}", "of evaluations", "predict one label"),
    )
    finished.write(f"{test}-stability{suffix}.md", markdown_table(columns, rows))
