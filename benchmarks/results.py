"""Writes the page of measured results, and tables of other pages, from JSON files.

    python -m benchmarks.results        # make results

A file of `docs/results/data` is what a benchmark wrote with `--output`. A folder there has reports
of a recipe and its `run.json`, which says when, where and from which commit. The folder `tables`
has tables of runs that stored no file: `columns`, `rows`, and where they come from (`SOURCE`).
Between `<!-- drawn from FILE -->` and `<!-- end -->` a page has the table of that file.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from as2ray.evaluation.report import SIGNIFICANCE_LEVEL

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "results"
PAGE, DATA, RUN, STORED = "measured.md", "data", "run.json", "tables"

PAGES, UNDRAWN = ("*.md", "papers/*.md", "results/*.md"), ("log.md", "reproduction.md")
"""Pages of `docs` with drawn tables, and those without: findings, and a page drawn elsewhere."""

SOURCE = ("date", "command", "machine", "seeds", "source")
"""What a table without a file of its run says of it."""

DRAWN = re.compile(r"(<!-- drawn from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A table of a page, which this module writes."""

RATES = {
    "pairs a second": "ranking",
    "requests a second": "a request of 30",
    "training, pairs a second": "training",
}
"""Measurements of `benchmarks.gpu` in its plot, and what they are called there."""

MEASURED = ("p50", "p99", "MAP")
"""What `benchmarks.budget` measures of each side."""

HOLDS = {True: "yes", False: "**no**", None: ""}

VALUE = re.compile(r"([+-]?\d+\.\d+)(?: ± (\d+\.\d+))?")
"""A number of a table, with its standard deviation."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of page and data")
    folder = parser.parse_args(argv).folder
    (folder / PAGE).write_text(build_page(folder / DATA), encoding="utf-8")
    write_plots(folder / DATA, folder)
    for path in list_pages() if folder == FOLDER else folder.glob("*.md"):
        path.write_text(fill_tables(path.read_text(encoding="utf-8"), folder / DATA), "utf-8")


def list_pages() -> list[Path]:
    """Returns the pages whose measured tables are drawn: README and docs, but not the log."""
    docs = FOLDER.parent
    pages = [ROOT / "README.md", *(path for pattern in PAGES for path in docs.glob(pattern))]
    return sorted(path for path in pages if path.name not in UNDRAWN)


def fill_tables(page: str, data: Path) -> str:
    """Returns a page with its tables as their files have them.

    Args:
        page: Text of the page.
        data: Folder of the files.
    """

    def draw(match: re.Match[str]) -> str:
        table = _draw_table(json.loads((data / match[2]).read_text(encoding="utf-8")))
        return f"{match[1]}\n{table}\n\n{match[3]}"

    return DRAWN.sub(draw, page)


def _draw_table(content: Any) -> str:
    if _is_bounds(content):
        return _bounds_table(content)
    if "columns" in content:
        rows = [[_format_cell(cell) for cell in row] for row in content["rows"]]
        return _table(content["columns"], rows)
    return _report_table(content) if _is_report(content) else TABLES[content["benchmark"]](content)


def _format_cell(cell: str | list[float | str]) -> str:
    """Returns a cell as it is written, or mean and standard deviation of its seeds and a mark."""
    if isinstance(cell, str):
        return cell
    values = [value for value in cell if not isinstance(value, str)]
    mark = f" {cell[-1]}" if isinstance(cell[-1], str) else ""
    return f"{mean(values):.3f} ± {stdev(values):.3f}{mark}"


def build_page(data: Path) -> str:
    """Returns the page: a section of each file, in the order of their names."""
    parts = [
        "# Measured results",
        "`make results` writes this page from the files in `docs/results/data`, which benchmarks "
        "and recipes wrote. What the numbers mean is in [Results](../results.md). "
        "`benchmarks.plan` computes hours; its runs were not made.",
    ]
    for path in sorted(data.iterdir()):
        if path.name != STORED:
            parts += _recipe_sections(path) if path.is_dir() else _benchmark_section(path)
    if stored := sorted((data / STORED).rglob("*.json")):
        parts += [
            "## Tables of runs that stored no file",
            "These runs were made before benchmarks and recipes stored files, or by scripts. Their "
            f"tables are in `data/{STORED}`; this says where each comes from.",
            _sources_table(stored),
        ]
    return "\n\n".join(parts) + "\n"


def write_plots(data: Path, folder: Path) -> None:
    """Writes the plots that the page shows."""
    for path in sorted(data.rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if _is_bounds(content):
            rows = [row["comparison"] for row in content]
            points = [(row["difference"], *row["interval"]) for row in rows]
            labels = [f"{each['test']} ({each['comparison']['num_questions']})" for each in content]
            title = f"{rows[0]['measure']}: cascade minus ranker, {rows[0]['confidence']:.0%}"
            _plot_intervals(points, labels, title, 0.0, folder / f"{path.stem}.png")
        elif _has_rates(content):
            points, labels = [], []
            for model, measured in content["results"].items():
                for key, name in RATES.items():
                    ratio = measured[key]["ratio"]
                    points.append((ratio["median"], ratio["min"], ratio["max"]))
                    labels.append(f"{model}, {name}")
            title = f"{content['machine']['gpu']}: times padded SDPA (smallest to largest)"
            _plot_intervals(points, labels, title, 1.0, folder / f"{path.stem}.png")
        elif _has_budgets(content):
            _plot_budgets(content["results"], folder / f"{path.stem}.png")
        elif isinstance(content, dict) and "plot" in content:
            _plot_table(content, folder / f"{path.parent.name}-{path.stem}.png")


def _benchmark_section(path: Path) -> Iterator[str]:
    report = json.loads(path.read_text(encoding="utf-8"))
    machine, name = report["machine"], report["benchmark"]
    variant = "" if path.stem == name else f" ({path.stem.removeprefix(f'{name}-')})"
    yield f"## benchmarks.{name}{variant}: {machine['gpu'] or 'CPU'}"
    flags = [f" --{key}" + ("" if value is True else f" {value}") for key, value in _given(report)]
    yield (
        f"`python -m benchmarks.{name}{''.join(flags)}`, {_describe_run(report)}. "
        f"Load average at the end: {machine['load_average'][0]:.1f}."
    )
    rows = [(each["claim"], each["measured"], HOLDS[each["holds"]]) for each in report["claims"]]
    yield _table(("claim", "measured", "holds"), rows)
    if _has_rates(report):
        yield f"![Ratios to padded SDPA]({path.stem}.png)"
    if _has_budgets(report):
        yield f"![MAP over the median time of a question]({path.stem}.png)"


def _given(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the flags of a run that are known: those that are set, numbers, and families."""
    given = report.get("arguments") or {key: report[key] for key in ("cores", "small")}
    values = [
        (key, v)
        for key, value in given.items()
        for v in (value if isinstance(value, list) else [value])
    ]
    return [(key, value) for key, value in values if value is not False]


def _recipe_sections(folder: Path) -> Iterator[str]:
    yield f"## Recipe {folder.name}"
    run = folder / RUN
    content = json.loads(run.read_text(encoding="utf-8"))
    seeds = ", ".join(map(str, content["seeds"]))
    yield f"{content['title']}; {_describe_run(content)}; seeds {seeds}."
    for path in sorted(set(folder.glob("*.json")) - {run}):
        content = json.loads(path.read_text(encoding="utf-8"))
        yield f"### {path.stem.removeprefix('bound-')}"
        yield _draw_table(content)
        if _is_bounds(content):
            yield f"![Differences with their intervals]({path.stem}.png)"


def _sources_table(paths: Sequence[Path]) -> str:
    rows = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        seeds = content["seeds"] or ""
        texts = {key: content[key] for key in SOURCE}
        texts["seeds"] = seeds if isinstance(seeds, str) else ", ".join(map(str, seeds))
        rows.append((f"{path.parent.name}/{path.stem}", *texts.values()))
    return _table(("table", *SOURCE), rows)


def _report_table(report: Mapping[str, Any]) -> str:
    """Returns the measures of a report's systems, marked where they differ from the baseline."""
    measures = list(report["rows"][0]["measures"])
    rows = []
    for row in report["rows"]:
        system = row["system"] + (" (baseline)" if row["system"] == report["baseline"] else "")
        cells = []
        for measure in measures:
            value = row["measures"][measure]
            deviation = "" if value["std"] is None else f" ± {value['std']:.4f}"
            mark = " †" if row["p_holm"].get(measure, 1.0) < SIGNIFICANCE_LEVEL else ""
            cells.append(f"{value['mean']:.4f}{deviation}{mark}")
        rows.append((system, *cells))
    names = {"AP": "MAP", "RR": "MRR"}
    return _table(("system", *(names.get(measure, measure) for measure in measures)), rows)


def _bounds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        *("test", "systems", "seeds", "questions", "ranker", "cascade", "difference"),
        *("interval", "p", "operations", "met"),
    )
    lines = []
    for row in rows:
        compared = row["comparison"]
        cost = "" if row["cost"] is None else f"{row['cost']:.1%} (at most {row['max_cost']:.0%})"
        lines.append(
            (
                *(row["test"], row["systems"], str(row["seeds"]), str(compared["num_questions"])),
                f"{compared['baseline_mean']:.4f}",
                f"{compared['system_mean']:.4f}",
                f"{compared['difference']:+.4f}",
                "[{:+.4f}, {:+.4f}]".format(*compared["interval"]),
                f"{compared['p_randomization']:.3f}",
                cost,
                HOLDS[row["is_met"]],
            )
        )
    return _table(columns, lines)


def _rates_table(report: Mapping[str, Any]) -> str:
    """Returns the speed of each model of `benchmarks.gpu` beside the padded side."""
    columns = (
        *("", "ranking, pairs/s", "to padded", "share", "request of 30 pairs", "to padded"),
        *("training, pairs/s", "to padded", "memory of training, packed and padded"),
    )
    lines = []
    for model, measured in report["results"].items():
        rates = {name: median(measured[key]["rates"]) for key, name in RATES.items()}
        ratios = {
            name: "{median:.2f} ({min:.2f} to {max:.2f})".format(**measured[key]["ratio"])
            for key, name in RATES.items()
        }
        ranking, request, training = RATES.values()
        share = f"{measured['part of the product']:.0%}".replace("%", " %")
        packed, padded = (measured["training memory, MB"][x] / 1000 for x in ("packed", "padded"))
        lines.append(
            (
                *(model, f"{rates[ranking]:,.0f}", ratios[ranking], share),
                *(f"{1000 / rates[request]:.2f} ms", ratios[request]),
                *(f"{rates[training]:,.0f}", ratios[training]),
                f"{packed:.1f} and {padded:.1f} GB",
            )
        )
    return _table(columns, lines)


def _budgets_table(report: Mapping[str, Any]) -> str:
    """Returns time and quality within each budget of `benchmarks.budget`."""
    lines = []
    for budget, sides in _budgets(report["results"]).items():
        cascade, cap = sides["cascade"], sides["blind cap"]
        times = [f"{side[key]:,.0f} ms" for side in (cascade, cap) for key in ("p50", "p99")]
        values = [f"{side['MAP']:.3f}" for side in (cascade, cap)]
        lines.append((budget, *times[:2], values[0], *times[2:], values[1]))
    sides = ("cascade", "ranker on as many as there is time for")
    columns = [f"{side}: p50" if key == "p50" else key for side in sides for key in MEASURED]
    return _table(("budget", *columns), lines)


def _search_table(report: Mapping[str, Any]) -> str:
    """Returns the times of a question's steps of `benchmarks.retrieval`, and those of answers."""
    lines: list[Sequence[str]] = []
    for size, measured in report["results"].items():
        for name, times in measured["search"]["ms"].items():
            lines.append((size, name, f"{times['p50']:,.1f}", f"{times['p99']:,.1f}", "", ""))
        for name, system in measured["ask"]["systems"].items():
            times = f"{system['ms']['p50']:.1f}", f"{system['ms']['p99']:.1f}"
            share = f"{system['hit@3']:.2f}", f"{system['ranked']:.1f}"
            lines.append((size, f"ask, {name}", *times, *share))
        for name, times in measured["peer"].items():
            shown = f"{times['p50']:,.1f}", f"{times['p99']:,.1f}"
            lines.append((size, f"{name} of the peers", *shown, "", ""))
    return _table(("sentences", "", "p50, ms", "p99, ms", "hit@3", "ranked, mean"), lines)


def _plan_table(report: Mapping[str, Any]) -> str:
    """Returns the hours of each paper of `benchmarks.plan`, on some numbers of devices."""
    lines = []
    for paper, plan in report["results"]["papers"].items():
        single, *several = plan["hours"].values()
        shown = [
            "{in sequence:.1f} / {side by side:.1f} ({devices of a gang})".format(**hours)
            for hours in several
        ]
        runs = f"{plan['runs']} ({plan['runs listed']})"
        lines.append((paper, runs, f"{single['in sequence']:.1f}", *shown))
    columns = [f"on {devices}" for devices in plan["hours"]]
    return _table(("paper", "distinct runs (listed)", *columns), lines)


def _budgets(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns what was measured within each budget, the shortest first, and without one."""
    return {name: sides for name, sides in results.items() if name == "none" or name[0].isdigit()}


def _describe_run(report: Mapping[str, Any]) -> str:
    """Says when, from which commit and on what a benchmark or a recipe ran."""
    machine = report["machine"]
    packages = machine.get("packages") or report["packages"]
    libraries = " and ".join(f"{name} {packages[name]}" for name in ("torch", "transformers"))
    device = machine["gpu"] or machine["system"]
    cores = f"{machine['cores']} cores, Python {machine['python']}, {libraries}"
    return f"{report['created_at'][:10]}, commit {report['commit']}, {device}, {cores}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_bounds(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and "comparison" in content[0]


def _is_report(content: Any) -> bool:
    return isinstance(content, dict) and content.keys() >= {"rows", "baseline"}


def _has_rates(content: Any) -> bool:
    results = content.get("results", {}) if isinstance(content, dict) else {}
    return bool(results) and all(
        isinstance(measured, dict) and measured.keys() >= RATES.keys()
        for measured in results.values()
    )


def _has_budgets(content: Any) -> bool:
    return isinstance(content, dict) and content.get("benchmark") == "budget"


def _plot_budgets(results: Mapping[str, Any], path: Path) -> None:
    """Plots MAP over the median time of a question: untrained scores, the ranker, the cascade."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    *within, whole = _budgets(results).values()
    for side, name, color in (
        ("cascade", "cascade", "tab:blue"),
        ("blind cap", "ranker", "tab:orange"),
    ):
        points = sorted((sides[side]["p50"], sides[side]["MAP"]) for sides in within)
        label = f"{name} within 25 to 500 ms" if side == "cascade" else "ranker on fewer candidates"
        axes.plot(*zip(*points), "o-", color=color, label=label, markersize=4, linewidth=1)
        end = whole[side]["p50"], whole[side]["MAP"]
        axes.plot(*end, "*", color=color, markersize=13, label=f"{name}, all candidates")
    for name, color in (("cosine", "tab:green"), ("hybrid", "tab:red")):
        if point := results.get(name):
            label = {"hybrid": "cosine and BM25, no ranker"}.get(name, "cosine, stored embeddings")
            axes.plot(point["p50"], point["MAP"], "s", color=color, label=label)
    label = "BM25's order, which is given"
    axes.axhline(results["BM25"], color="gray", linestyle="--", linewidth=1, label=label)
    axes.set_xscale("log")
    ticks = [10, 20, 50, 100, 200, 500]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("median time of a question, ms")
    axes.set_ylabel("MAP")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    title = "{questions} questions of SQuAD, up to {candidates} sentences each".format(**results)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _plot_intervals(
    points: Sequence[tuple[float, float, float]],
    labels: Sequence[str],
    title: str,
    reference: float | None,
    path: Path,
) -> None:
    """Plots values with their ranges, one below the other, beside a reference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.9 + 0.32 * len(points)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(points))[::-1]
    values = [value for value, _, _ in points]
    errors = [[v - low for v, low, _ in points], [high - v for v, _, high in points]]
    axes.errorbar(values, list(rows), xerr=errors, fmt="o", capsize=3)
    if reference is not None:
        axes.axvline(reference, color="gray", linewidth=1, linestyle="--")
    axes.set_yticks(list(rows), labels)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=90, metadata={"Software": None})


def _plot_table(content: Mapping[str, Any], path: Path) -> None:
    """Plots a column of a stored table beside its baseline, or its rows as curves."""
    columns, rows, plot = content["columns"], content["rows"], content["plot"]
    if "column" not in plot:
        _plot_curves(columns[1:], rows, plot["title"], path)
        return
    index = columns.index(plot["column"])
    points, labels, reference = [], [], None
    for row in rows:
        if value := VALUE.match(row[index]):
            number, deviation = float(value[1]), float(value[2] or 0)
            points.append((number, number - deviation, number + deviation))
            labels.append(row[0])
            reference = number if "(baseline)" in row[0] else reference
    _plot_intervals(points, labels, plot["title"], reference, path)


def _plot_curves(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, path: Path
) -> None:
    """Plots each row of a table over its columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, *cells in rows:
        values = [(x, VALUE.match(cell)) for x, cell in enumerate(cells)]
        points = [(x, float(v[1]), float(v[2] or 0)) for x, v in values if v]
        x, y, errors = zip(*points)
        axes.errorbar(x, y, errors, fmt="o-", capsize=3, markersize=4, label=name.replace("`", ""))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


TABLES = {
    "gpu": _rates_table,
    "budget": _budgets_table,
    "plan": _plan_table,
    "retrieval": _search_table,
}
"""Tables of pages, by the benchmark that wrote the file."""

if __name__ == "__main__":
    main()
