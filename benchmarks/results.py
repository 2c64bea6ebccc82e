"""Writes the page of measured results, and tables of other pages, from JSON files.

    python -m benchmarks.results        # make results

A file of `docs/results/data` is what a benchmark wrote with `--output`. A folder there has reports
of a recipe (`bound-*.json`) and its `run.json`, which says when, where and from which commit.
Between `<!-- drawn from FILE -->` and `<!-- end -->` a page has the table of that file.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "results"
PAGE, DATA, RUN = "measured.md", "data", "run.json"
PAPERS = FOLDER.parent / "papers"

DRAWN = re.compile(r"(<!-- drawn from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A table of a page, which this module writes."""

RATES = {
    "pairs a second": "ranking",
    "requests a second": "a request of 30",
    "training, pairs a second": "training",
}
"""Measurements of `benchmarks.gpu` in its plot, and what they are called there."""

HOLDS = {True: "yes", False: "**no**", None: ""}


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of page and data")
    folder = parser.parse_args(argv).folder
    (folder / PAGE).write_text(build_page(folder / DATA), encoding="utf-8")
    write_plots(folder / DATA, folder)
    for path in (*folder.glob("*.md"), *(PAPERS.glob("*.md") if folder == FOLDER else ())):
        path.write_text(fill_tables(path.read_text(encoding="utf-8"), folder / DATA), "utf-8")


def fill_tables(page: str, data: Path) -> str:
    """Returns a page with its tables as their files have them.

    Args:
        page: Text of the page.
        data: Folder of the files.
    """

    def draw(match: re.Match[str]) -> str:
        content = json.loads((data / match[2]).read_text(encoding="utf-8"))
        table = _bounds_table(content) if _is_bounds(content) else _rates_table(content)
        return f"{match[1]}\n{table}\n\n{match[3]}"

    return DRAWN.sub(draw, page)


def build_page(data: Path) -> str:
    """Returns the page: a section of each file, in the order of their names."""
    parts = [
        "# Measured results",
        "`make results` writes this page from the files in `docs/results/data`, which benchmarks "
        "and recipes wrote; no number is typed by hand. What the numbers mean is in "
        "[Results](../results.md).",
    ]
    for path in sorted(data.iterdir()):
        parts += _recipe_sections(path) if path.is_dir() else _benchmark_section(path)
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


def _benchmark_section(path: Path) -> Iterator[str]:
    report = json.loads(path.read_text(encoding="utf-8"))
    machine = report["machine"]
    small = " --small" if report["small"] else ""
    yield f"## benchmarks.{report['benchmark']}: {machine['gpu'] or 'CPU'}"
    yield (
        f"`python -m benchmarks.{report['benchmark']} --cores {report['cores']}{small}`, "
        f"{_describe_run(report)}. Load average at the end: {machine['load_average'][0]:.1f}."
    )
    rows = [(each["claim"], each["measured"], HOLDS[each["holds"]]) for each in report["claims"]]
    yield _table(("claim", "measured", "holds"), rows)
    if _has_rates(report):
        yield f"![Ratios to padded SDPA]({path.stem}.png)"


def _recipe_sections(folder: Path) -> Iterator[str]:
    yield f"## Recipe {folder.name}"
    run = folder / RUN
    if run.is_file():
        content = json.loads(run.read_text(encoding="utf-8"))
        seeds = ", ".join(map(str, content["seeds"]))
        yield f"{content['title']}; {_describe_run(content)}; seeds {seeds}."
    else:
        yield "The run was made before recipes stored date, machine and commit."
    for path in sorted(folder.glob("bound-*.json")):
        yield f"### {path.stem.removeprefix('bound-')}"
        yield _bounds_table(json.loads(path.read_text(encoding="utf-8")))
        yield f"![Differences with their intervals]({path.stem}.png)"


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


def _has_rates(content: Any) -> bool:
    results = content.get("results", {}) if isinstance(content, dict) else {}
    return bool(results) and all(
        isinstance(measured, dict) and measured.keys() >= RATES.keys()
        for measured in results.values()
    )


def _plot_intervals(
    points: Sequence[tuple[float, float, float]],
    labels: Sequence[str],
    title: str,
    reference: float,
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
    axes.axvline(reference, color="gray", linewidth=1, linestyle="--")
    axes.set_yticks(list(rows), labels)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()
