import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.container import BarContainer

from as2ray.evaluation.histogram import histogram_svg
from as2ray.evaluation.plots import (
    ParetoPanel,
    bar_chart,
    heatmap,
    histogram,
    learning_curve,
    loss_curve,
    pareto_plot,
    reliability_diagram,
    speed_plot,
)
from as2ray.evaluation.seeds import SeedSummary
from as2ray.tables.reliability import measure_reliability

POINTS = [(2, 0.5), (1, 0.2), (1, 0.4), (2, 0.7)]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_learning_curve_is_written_as_its_suffix_says(tmp_path, suffix, magic):
    path = tmp_path / f"curve{suffix}"
    figure = learning_curve({"FT": POINTS, "TANDA": POINTS}, "WikiQA", "epochs", "MAP", path)
    assert [line.get_label() for line in figure.axes[0].lines] == ["FT", "TANDA"]
    assert path.read_bytes().startswith(magic)


def test_learning_curve_draws_mean_over_seeds_in_a_band(tmp_path):
    figure = learning_curve({"FT": POINTS}, "WikiQA", "epochs", "MAP", tmp_path / "curve.png")
    (axes,) = figure.axes
    (line,), (band,) = axes.lines, axes.collections
    np.testing.assert_allclose(line.get_xydata(), [[1, 0.3], [2, 0.6]])
    assert line.get_marker() == "o"
    assert all(tick == round(tick) for tick in axes.get_xticks())  # of whole epochs
    std = np.std([0.2, 0.4], ddof=1)
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.3 - std, 0.6 + std))
    shown = {side: spine.get_visible() for side, spine in axes.spines.items()}
    assert shown == {"left": True, "bottom": True, "top": False, "right": False}
    assert axes.get_axisbelow() is True
    assert same_color(band.get_facecolor()[0][:3], line.get_color())


def test_learning_curve_may_draw_the_range_over_samples(tmp_path):
    points, path = [(1, 0.2), (1, 0.3), (1, 0.7)], tmp_path / "curve.png"
    figure = learning_curve({"FT": points}, "", "queries", "MRR", path, band="range")
    heights = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.2, 0.7)


@pytest.mark.filterwarnings("error")
def test_band_of_a_single_seed_is_its_line(tmp_path):
    figure = learning_curve({"FT": POINTS[:2]}, "", "epochs", "MAP", tmp_path / "curve.png")
    heights = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert sorted(set(heights)) == [0.2, 0.5]


def test_loss_curve_is_labelled_by_step(tmp_path):
    (axes,) = loss_curve({"run": [(0, 2.0), (10, 1.0)]}, "Transfer", tmp_path / "loss.png").axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("Transfer", "step", "loss")
    assert axes.lines[0].get_marker() == ""


def test_steps_may_have_a_logarithmic_axis_above_10(tmp_path):
    points, path = [(0, 1.0), (10, 2.0), (1000, 3.0)], tmp_path / "curve.png"
    (axes,) = learning_curve({"FT": points}, "", "queries", "MRR", path, log_x=True).axes
    ends = [axes.transData.transform((x, 0))[0] for x in (0, 10, 1000)]
    assert axes.get_xscale() == "symlog"
    assert axes.xaxis.get_transform().linthresh == 10
    assert ends[1] - ends[0] < ends[2] - ends[1]
    linear = learning_curve({"FT": points}, "", "queries", "MRR", path).axes[0]
    assert linear.get_xscale() == "linear"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_several_systems_are_told_by_a_legend(tmp_path, number):
    names, path = ["a", "b", "c"][:number], tmp_path / "plot.svg"
    figures = [
        learning_curve(dict.fromkeys(names, POINTS), "Title", "", "", path),
        bar_chart({name: {"AP": SeedSummary(0.5, None, 1)} for name in names}, "Title", "", path),
    ]
    for figure in figures:
        shown = [text.get_text() for each in figure.legends for text in each.get_texts()]
        assert shown == (names if number > 1 else [])
        assert figure.axes[0].get_title() == "Title"


def has_grid(axes) -> tuple[bool, bool]:
    """Whether lines of a grid are shown at the ticks of x and of y."""
    lines = axes.get_xgridlines(), axes.get_ygridlines()
    return tuple(any(line.get_visible() for line in each) for each in lines)


def test_bars_leave_out_what_was_not_measured(tmp_path):
    systems = {
        "BM25": {"AP": SeedSummary(0.5, None, 1), "RR": SeedSummary(0.6, None, 1)},
        "TANDA": {"AP": SeedSummary(0.9, 0.01, 3)},
    }
    (axes,) = bar_chart(systems, "WikiQA", "value", tmp_path / "bars.png").axes
    assert (axes.get_title(), axes.get_ylabel()) == ("WikiQA", "value")
    heights = [bar.get_height() for bar in axes.patches]
    np.testing.assert_array_equal(heights, [0.5, 0.6, 0.9, np.nan])
    # The bars of a measure stand beside each other around its tick.
    np.testing.assert_allclose(
        [bar.get_x() + bar.get_width() / 2 for bar in axes.patches], [-0.2, 0.8, 0.2, 1.2]
    )
    of_bm25, of_tanda = (c for c in axes.containers if isinstance(c, BarContainer))
    np.testing.assert_allclose(
        of_bm25.errorbar.lines[2][0].get_segments()[0], [[-0.2, 0.5], [-0.2, 0.5]]
    )
    np.testing.assert_allclose(
        of_tanda.errorbar.lines[2][0].get_segments()[0], [[0.2, 0.89], [0.2, 0.91]]
    )
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["AP", "RR"]
    assert has_grid(axes) == (False, True)
    assert axes.get_ylim()[1] < 1.1
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.368] * 4)  # of 0.4


def test_pareto_plot_has_a_panel_for_each_measure_and_cost_with_its_marks(tmp_path):
    marks = {"drop 0.3": (60.0, 0.5), "drop 0.5": (40.0, 0.4)}
    panels = [
        [ParetoPanel(cost, m, {"grid": POINTS}, [(1, 0.4), (2, 0.7)], marks) for m in ("AP", "RR")]
        for cost in ("layers", "operations")
    ]
    figure = pareto_plot(panels, "Figure 2", tmp_path / "pareto.png")
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
    assert labels == [(c, m) for c in ("layers", "operations") for m in ("AP", "RR")]
    grid, *marked = figure.axes[0].collections
    assert len(grid.get_offsets()) == len(POINTS)
    assert [tuple(mark.get_offsets()[0]) for mark in marked] == list(marks.values())
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["grid", "Pareto front", *marks]
    assert (figure.get_suptitle(), len(figure.legends)) == ("Figure 2", 1)


def test_histogram_has_a_bar_for_each_twentieth():
    svg = histogram_svg(np.array([-1.0, 0.0, 0.04, 0.05, 0.5, 0.5, 1.0, 7.0]))
    bars = re.findall(r'x="(\d+)" y="([\d.]+)" width="8" height="([\d.]+)"><title>(\d+)<', svg)
    assert [int(count) for *_, count in bars] == [3, 1, *[0] * 8, 2, *[0] * 8, 2]
    assert [int(x) for x, *_ in bars] == list(range(0, 180, 9))
    assert bars[0][1:3] == ("0.0", "40.0")
    assert bars[1][1:3] == ("26.7", "13.3")
    assert svg.startswith('<svg width="180" height="40" ')
    assert "".join(ElementTree.fromstring(svg).itertext()) == "".join(count for *_, count in bars)
    middle = histogram_svg(np.array([0.41, 0.59]))
    assert [middle.index(f'<rect x="{x}" y="0.0"') for x in (72, 99)]
    assert "nan" not in histogram_svg(np.array([]))
    assert '<rect x="90" y="0.0" width="8" height="40.0">' in histogram_svg(np.array([0.5]))


def test_histogram_plot_has_equal_bins_from_0_to_1(tmp_path):
    shares = {"a": [0.7, 0.1, 0.0, 0.2], "b": [0.25] * 4}
    figure = histogram(shares, "Confidence", "score", "share", tmp_path / "h.svg")
    (axes,) = figure.axes
    values, edges, _ = axes.patches[0].get_data()
    assert (values.tolist(), edges.tolist()) == ([0.7, 0.1, 0.0, 0.2], [0, 0.25, 0.5, 0.75, 1])
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        *("Confidence", "score", "share"),
    )
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert not histogram({"a": [0.5, 0.5]}, "", "", "", tmp_path / "h.svg").legends


def test_speed_plot_has_overlap_over_speed_and_both_times_of_a_question(tmp_path):
    systems = {"fast": (900.0, 0.8, 10.0, 20.0), "whole": (300.0, 1.0, 35.0, 41.0)}
    figure = speed_plot(systems, "Speed", tmp_path / "speed.svg")
    points, bars = figure.axes
    offsets = [tuple(dots.get_offsets()[0]) for dots in points.collections]
    assert offsets == [(900.0, 0.8), (300.0, 1.0)]
    assert [bar.get_width() for bar in bars.patches] == [20.0, 10.0, 41.0, 35.0]
    assert [text.get_text() for text in bars.texts] == [" 10, 20", " 35, 41"]
    assert [tick.get_text() for tick in bars.get_yticklabels()] == list(systems)
    assert [axes.get_xlabel() for axes in figure.axes] == [
        *("pairs per second", "milliseconds of a question (p50, p95)"),
    ]
    assert (figure.get_suptitle(), points.get_ylabel()) == ("Speed", "overlap of the first 10")
    places = [axes.get_subplotspec() for axes in figure.axes]
    assert [place.get_geometry() for place in places] == [(1, 2, 0, 0), (1, 2, 1, 1)]
    colors = [dots.get_facecolor()[0][:3].tolist() for dots in points.collections]
    assert colors == [[*bar.get_facecolor()[:3]] for bar in bars.patches[1::2]]
    assert colors[0] != colors[1]
    assert points.get_xlim()[0] == 0
    assert 1 < points.get_ylim()[1] < 1.1
    assert bars.yaxis_inverted()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(systems)


def test_heatmap_has_the_number_of_each_cell(tmp_path):
    values = np.array([[0.1, 0.9, np.nan], [0.6, 0.61, 0.95]])
    names = ["r0", "r1"], ["c0", "c1", "c2"]
    (axes,) = heatmap(values, *names, "Figure 3", tmp_path / "heatmap.svg").axes
    texts = {(*map(int, text.get_position()),): text.get_text() for text in axes.texts}
    assert texts == {(c, r): f"{values[r, c]:.3f}" for r in range(2) for c in range(3)}
    dark = [text.get_text() for text in axes.texts if text.get_color() == "white"]
    assert dark == ["0.900", "0.610", "0.950"]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("Figure 3", "", "")
    assert has_grid(axes) == (False, False)
    assert not axes.figure.legends
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), values)
    assert (image.get_clim(), image.get_cmap().name) == ((0.0, 1.0), "Blues")
    assert [tick.get_text() for tick in axes.get_yticklabels()] == names[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == names[1]


def test_reliability_diagram_has_the_diagonal_and_each_system_with_its_error(tmp_path):
    curve = measure_reliability(np.array([0.1, 0.2, 0.9]), np.array([0, 1, 1]), 2)
    figure = reliability_diagram({"teacher": curve}, "Reliability", tmp_path / "r.svg")
    (axes,) = figure.axes
    diagonal, line = axes.lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    np.testing.assert_allclose(line.get_xydata(), [[0.15, 0.5], [0.9, 1.0]])
    assert line.get_marker() == "o"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["teacher, ECE 0.267"]
    assert (axes.get_title(), axes.get_ylabel()) == ("Reliability", "share that answers")
    assert axes.get_xlabel() == "mean score"
