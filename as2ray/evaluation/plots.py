"""Plots of results with matplotlib, without pyplot and its global state."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from as2ray.evaluation.seeds import SeedSummary
from as2ray.tables.reliability import Reliability

Points = Iterable[tuple[float, float]]
"""x and y of each point; points with the same x are of different seeds."""

_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333"]
# The palette of Okabe and Ito, which color-blind readers can distinguish.


def learning_curve(
    series: Mapping[str, Points],
    title: str,
    x_label: str,
    y_label: str,
    path: Path | str,
    *,
    markers: bool = True,
    log_x: bool = False,
    band: Literal["std", "range"] = "std",
) -> Figure:
    """Plots a line per system, its mean over seeds, with a band.

    TANDA's Figure 4 is such a plot of MAP over epochs, and Mokrii et al.'s Figure 1 one of MRR over
    the number of training queries, with the range over samples.

    Args:
        series: Points by system.
        title: Heading.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        path: File to write, `.png` or `.svg`.
        markers: Whether each point is marked.
        log_x: Whether the x axis is logarithmic above 10; it is linear from 0 to 10.
        band: One standard deviation on either side of the mean, or the lowest and highest values.
    """
    figure, axes = _create_figure(title, x_label, y_label)
    for name, points in series.items():
        x, mean, low, high = _summarize_points(points, band)
        (line,) = axes.plot(x, mean, label=name, marker="o" if markers else "", markersize=4)
        color = line.get_color()
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    if log_x:
        axes.set_xscale("symlog", linthresh=10)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _save_figure(figure, path, legend=len(series) > 1)


def loss_curve(series: Mapping[str, Points], title: str, path: Path | str) -> Figure:
    """Plots the loss over steps, one line per run."""
    return learning_curve(series, title, "step", "loss", path, markers=False)


def bar_chart(
    systems: Mapping[str, Mapping[str, SeedSummary]], title: str, y_label: str, path: Path | str
) -> Figure:
    """Plots a group of bars per measure, one bar per system, with the deviation over seeds.

    Args:
        systems: Measures of each system: `{row.system: row.measures for row in report.rows}`.
        title: Heading.
        y_label: Label of the y axis.
        path: File to write, `.png` or `.svg`.
    """
    measures = list(dict.fromkeys(m for values in systems.values() for m in values))
    figure, axes = _create_figure(title, "", y_label)
    width = 0.8 / len(systems)
    for number, (name, values) in enumerate(systems.items()):
        x = np.arange(len(measures)) + (number - (len(systems) - 1) / 2) * width
        means = [values[m].mean if m in values else np.nan for m in measures]
        stds = [(values[m].std if m in values else None) or 0.0 for m in measures]
        # Error bars have no caps, so that a single seed shows none.
        error_style = {"elinewidth": 1.5}
        bars = axes.bar(x, means, width * 0.92, yerr=stds, label=name, error_kw=error_style)
        axes.bar_label(bars, fmt="%.3f", fontsize=8, padding=2)
    axes.set_xticks(range(len(measures)), measures)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    return _save_figure(figure, path, legend=len(systems) > 1)


@dataclass(frozen=True)
class ParetoPanel:
    """Points of several kinds, and the line of the Pareto front."""

    x_label: str
    y_label: str
    series: Mapping[str, Points]
    """Points by kind."""
    front: Points
    """Points of the Pareto front, sorted by x."""
    marks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Single points with a marker of their own, by name."""


def pareto_plot(panels: Sequence[Sequence[ParetoPanel]], title: str, path: Path | str) -> Figure:
    """Plots rows of panels (Cascade Transformer, Figure 2: a measure each, over relative cost).

    Args:
        panels: Panels by row and column; all have the same kinds of points.
        title: Heading.
        path: File to write, `.png` or `.svg`.
    """
    num_rows, num_columns = len(panels), len(panels[0])
    figure = Figure(figsize=(3.2 * (num_columns + 1), 3.0 * num_rows + 1), layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(chain.from_iterable(panels), 1):
        axes = figure.add_subplot(
            num_rows, num_columns, number, xlabel=panel.x_label, ylabel=panel.y_label
        )
        _style_axes(axes)
        for points in panel.series.values():
            xs, ys = zip(*points)
            axes.scatter(xs, ys, s=9, alpha=0.5, linewidth=0)
        xs, ys = zip(*panel.front)
        axes.step(xs, ys, where="post", color=_COLORS[-1], linewidth=1.2)
        for (x, y), marker in zip(panel.marks.values(), cycle("^s*D")):
            axes.scatter(x, y, s=40, color=_COLORS[-1], marker=marker, zorder=3)
    # All panels have the same artists, so that those of the last one explain them all.
    names = [*panel.series, "Pareto front", *panel.marks]
    kinds, num_series = axes.collections, len(panel.series)
    handles = [*kinds[:num_series], *axes.lines, *kinds[num_series:]]
    figure.legend(handles, names, loc="outside lower center", ncols=6, frameon=False)
    return _save_figure(figure, path, legend=False)


def histogram(
    series: Mapping[str, Sequence[float]], title: str, x_label: str, y_label: str, path: Path | str
) -> Figure:
    """Plots the shares of equal bins from 0 to 1 as steps, on a logarithmic axis.

    Args:
        series: Share of each bin by system.
        title: Heading.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        path: File to write, `.png` or `.svg`.
    """
    figure, axes = _create_figure(title, x_label, y_label)
    for name, shares in series.items():
        axes.stairs(shares, np.linspace(0, 1, len(shares) + 1), label=name, linewidth=1.5)
    axes.set_yscale("log")
    return _save_figure(figure, path, legend=len(series) > 1)


def speed_plot(
    systems: Mapping[str, tuple[float, float, float, float]], title: str, path: Path | str
) -> Figure:
    """Plots what systems keep over their speed, and the time of a question beside it.

    Args:
        systems: Pairs per second, overlap with the reference from 0 to 1, and the 50th and 95th
            percentile of the time of a question in milliseconds, by system.
        title: Heading.
        path: File to write, `.png` or `.svg`.
    """
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    figure.suptitle(title)
    axes = figure.add_subplot(1, 2, 1, xlabel="pairs per second", ylabel="overlap of the first 10")
    bars = figure.add_subplot(1, 2, 2, xlabel="milliseconds of a question (p50, p95)")
    for part in (axes, bars):
        _style_axes(part)
    for number, (name, (speed, overlap, p50, p95)) in enumerate(systems.items()):
        color = _COLORS[number % len(_COLORS)]
        axes.scatter(speed, overlap, s=45, color=color, label=name, zorder=3)
        bars.barh(number, p95, color=color, alpha=0.35)
        bars.barh(number, p50, color=color)
        bars.text(p95, number, f" {p50:.0f}, {p95:.0f}", va="center", fontsize=8)
    axes.set_xlim(left=0)
    axes.set_ylim(top=1.02)
    bars.set_yticks(range(len(systems)), systems)
    bars.invert_yaxis()
    bars.margins(x=0.2)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return _save_figure(figure, path, legend=False)


def heatmap(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str, path: Path | str
) -> Figure:
    """Plots values from 0 to 1 as shades, with the number in each cell (CERBERUS, Figure 3).

    Args:
        values: Shape [rows, columns]; NaN is white.
        rows: Names of the rows.
        columns: Names of the columns.
        title: Heading.
        path: File to write, `.png` or `.svg`.
    """
    figure, axes = _create_figure(title, "", "")
    axes.grid(visible=False)
    axes.imshow(values, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for (row, column), value in np.ndenumerate(values):
        text_color = "white" if value > 0.6 else "black"
        axes.text(column, row, f"{value:.3f}", ha="center", va="center", color=text_color)
    return _save_figure(figure, path, legend=False)


def reliability_diagram(systems: Mapping[str, Reliability], title: str, path: Path | str) -> Figure:
    """Plots accuracy over mean score by bins; calibrated scores lie on the diagonal.

    Args:
        systems: Reliability of each system.
        title: Heading.
        path: File to write, `.png` or `.svg`.
    """
    figure, axes = _create_figure(title, "mean score", "share that answers")
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    for name, curve in systems.items():
        label = f"{name}, ECE {curve.ece:.3f}"
        axes.plot(curve.mean_scores, curve.accuracy, marker="o", markersize=4, label=label)
    return _save_figure(figure, path, legend=True)


def _summarize_points(points: Points, band: str) -> tuple[np.ndarray, ...]:
    """Returns x, and mean, lower and upper limit of the points with this x; each of shape [x]."""
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[x].append(y)
    xs = sorted(by_x)
    means = np.array([np.mean(by_x[x]) for x in xs])
    if band == "range":
        low, high = (np.array([limit(by_x[x]) for x in xs]) for limit in (min, max))
        return np.array(xs), means, low, high
    stds = np.array([np.std(by_x[x], ddof=1) if len(by_x[x]) > 1 else 0.0 for x in xs])
    return np.array(xs), means, means - stds, means + stds


def _create_figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
    _style_axes(axes)
    return figure, axes


def _style_axes(axes: Axes) -> None:
    axes.set_prop_cycle(color=_COLORS)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save_figure(figure: Figure, path: Path | str, *, legend: bool) -> Figure:
    if legend:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=160)
    return figure
