"""Figures of results: curves over training, and bars of a results table.

Knows numbers and names. Must not know models, tables or measures. Every figure is an object of
its own: nothing is drawn on a global canvas, so that threads and notebooks are left alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from as2ray.evaluation.reliability import Reliability
from as2ray.evaluation.seeds import SeedSummary

Points = Iterable[tuple[float, float]]
"""x and y; an x that comes several times is one of several seeds."""

_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333"]
# Okabe and Ito's palette: told apart by colour-blind readers too.


def learning_curve(
    series: Mapping[str, Points],
    title: str,
    x_label: str,
    y_label: str,
    path: Path | str,
    *,
    markers: bool = True,
    log_x: bool = False,
) -> Figure:
    """One line a system, its mean over seeds, in a band of one standard deviation.

    TANDA's Figure 4 is this with MAP over epochs, Mokrii et al.'s Figure 1 with MRR over numbers of
    training queries.

    Args:
        series: Points by system.
        title: Heading.
        x_label: What x is.
        y_label: What y is.
        path: Where to, `.png` or `.svg`.
        markers: Whether each point is marked.
        logarithmic: Whether x is, above 10; below it there is room for 0.
    """
    figure, axes = _create_figure(title, x_label, y_label)
    for number, (name, points) in enumerate(series.items()):
        x, mean, std = _average_over_seeds(points)
        colour = _COLORS[number % len(_COLORS)]
        axes.plot(x, mean, label=name, color=colour, marker="o" if markers else "", markersize=4)
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    if log_x:
        axes.set_xscale("symlog", linthresh=10)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _save_figure(figure, path, legend=len(series) > 1)


def loss_curve(series: Mapping[str, Points], title: str, path: Path | str) -> Figure:
    """Loss over steps, one line a run."""
    return learning_curve(series, title, "step", "loss", path, markers=False)


def bar_chart(
    systems: Mapping[str, Mapping[str, SeedSummary]], title: str, y_label: str, path: Path | str
) -> Figure:
    """A group of bars a measure, one bar a system, with one standard deviation over seeds.

    Args:
        systems: By system, its measures: `{row.system: row.measures for row in report.rows}`.
        title: Heading.
        y_label: What y is.
        path: Where to, `.png` or `.svg`.
    """
    measures = list(dict.fromkeys(m for values in systems.values() for m in values))
    figure, axes = _create_figure(title, "", y_label)
    width = 0.8 / len(systems)
    for number, (name, values) in enumerate(systems.items()):
        x = np.arange(len(measures)) + (number - (len(systems) - 1) / 2) * width
        drawn = axes.bar(
            x,
            [values[m].mean if m in values else np.nan for m in measures],
            width * 0.92,
            yerr=[(values[m].std if m in values else None) or 0.0 for m in measures],
            label=name,
            color=_COLORS[number % len(_COLORS)],
            error_kw={"elinewidth": 1.5},  # no caps: a single seed shows none
        )
        axes.bar_label(drawn, fmt="%.3f", fontsize=8, padding=2)
    axes.set_xticks(range(len(measures)), measures)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    return _save_figure(figure, path, legend=len(systems) > 1)


def pareto_plot(
    series: Mapping[str, Points],
    pareto_front: Points,
    title: str,
    x_label: str,
    y_label: str,
    path: Path | str,
) -> Figure:
    """Points of several kinds, and the line of those that none beats.

    The Cascade Transformer's Figure 2 is this with MAP over relative cost.

    Args:
        series: Points by kind.
        front: The Pareto front, in the order of x.
        title: Heading.
        x_label: What x is.
        y_label: What y is.
        path: Where to, `.png` or `.svg`.
    """
    figure, axes = _create_figure(title, x_label, y_label)
    for number, (name, points) in enumerate(series.items()):
        x, y = zip(*points)
        axes.scatter(x, y, s=9, alpha=0.5, linewidth=0, label=name, color=_COLORS[number])
    x, y = zip(*pareto_front)
    axes.step(x, y, where="post", color=_COLORS[-1], linewidth=1.2, label="Pareto front")
    return _save_figure(figure, path, legend=True)


def heatmap(
    values: np.ndarray,
    row_names: Sequence[str],
    column_names: Sequence[str],
    title: str,
    path: Path | str,
) -> Figure:
    """Numbers from 0 to 1 as shades, each written into its field (CERBERUS, Figure 3).

    Args:
        values: Shape [rows, columns]; NaN is left white.
        rows: Names.
        columns: Names.
        title: Heading.
        path: Where to, `.png` or `.svg`.
    """
    figure, axes = _create_figure(title, "", "")
    axes.grid(visible=False)
    axes.imshow(values, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(column_names)), column_names)
    axes.set_yticks(range(len(row_names)), row_names)
    for (row, column), value in np.ndenumerate(values):
        dark = "white" if value > 0.6 else "black"
        axes.text(column, row, f"{value:.3f}", ha="center", va="center", color=dark)
    return _save_figure(figure, path, legend=False)


def reliability_diagram(systems: Mapping[str, Reliability], title: str, path: Path | str) -> Figure:
    """Share of answers over mean score, by bins; on the diagonal a score is a probability.

    Args:
        systems: Reliability by name.
        title: Heading.
        path: Where to, `.png` or `.svg`.
    """
    figure, axes = _create_figure(title, "mean score", "share that answers")
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    for number, (name, found) in enumerate(systems.items()):
        colour = _COLORS[number % len(_COLORS)]
        label = f"{name}, ECE {found.ece:.3f}"
        axes.plot(
            found.mean_scores, found.accuracy, marker="o", markersize=4, color=colour, label=label
        )
    return _save_figure(figure, path, legend=True)


def _average_over_seeds(points: Points) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[x].append(y)
    xs = sorted(by_x)
    means = [np.mean(by_x[x]) for x in xs]
    stds = [np.std(by_x[x], ddof=1) if len(by_x[x]) > 1 else 0.0 for x in xs]
    return np.array(xs), np.array(means), np.array(stds)


def _create_figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save_figure(figure: Figure, path: Path | str, *, legend: bool) -> Figure:
    if legend:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=160)
    return figure
