"""Curves and end points of a study of starts and numbers of questions (Mokrii et al. 2021)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy import stats

from as2ray.evaluation import plots
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.seeds import align_by_question, average_over_seeds

SIGNIFICANT = 0.01
"""Significance level of the paper's paired t-tests."""

Systems = Mapping[str, Mapping[int, EvaluationResult]]
"""Results by system (`START`, `START+SIZE`, `BM25`) and sample."""


def curve(
    title: str, systems: Systems, sizes: Mapping[int | None, int], measure: str, path: Path
) -> None:
    """Plots a measure over the number of labeled questions, a line per start; 0 is zero-shot.

    Args:
        title: Title of the plot.
        systems: Results by system and sample.
        sizes: Number of questions of each sample size; None is all.
        measure: Name of the measure.
        path: The image file.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    for name, by_sample in systems.items():
        start, _, size = name.partition("+")
        if "," in name:
            continue  # Remedies are only in the report.
        places = [0] if not size else [sizes[None if size == "all" else int(size)]]
        if start == "BM25":
            places = [0, *sizes.values()]
        points = [(float(x), e.measures[measure]) for e in by_sample.values() for x in places]
        series.setdefault(start, []).extend(points)
    plots.learning_curve(series, title, "annotated questions", measure, path, log_x=True)


Ends = Mapping[str, Sequence[str]]
"""Zero-shot and full-shot cells of each start, with the paper's marks; empty without a result."""


def ends(systems: Systems, transfer_sources: Sequence[str], measure: str) -> Ends:
    """Returns the cells of Table 1 for one target.

    Args:
        systems: Results by system and sample.
        transfer_sources: Starts that were trained on other corpora.
        measure: Name of the measure.
    """
    found = {}
    for start in [*transfer_sources, "BM25", "pseudo", "scratch"]:
        found[start] = ["", ""]
        for place, name in enumerate((start, f"{start}+all")):
            if name in systems:
                value = average_over_seeds([e.per_question for e in systems[name].values()])
                mean = sum(value[measure].to_pylist()) / value.num_rows
                found[start][place] = f"{mean:.4f}{_mark(systems, name, measure)}"
    return found


def table_1(targets: Mapping[str, Ends], measure: str) -> str:
    """Returns Table 1 as Markdown: zero-shot (ZS) and full-shot (FS) of each start on each target.

    Args:
        targets: Cells by target, of one study or of several.
        measure: Name of the measure.
    """
    starts = list(dict.fromkeys(start for of_target in targets.values() for start in of_target))
    heads = " | ".join(f"{target} ZS | {target} FS" for target in targets)
    lines = [f"| {measure} | {heads} |", "|" + "---|" * (1 + 2 * len(targets))]
    for start in starts:
        cells = [cell for of_target in targets.values() for cell in of_target.get(start, ("", ""))]
        lines.append(f"| {start} | {' | '.join(cells)} |")
    told = "*: differs from pseudo; #: pseudo differs from BM25; paired t-test, p < 0.01."
    return "\n".join([*lines, "", told]) + "\n"


def _mark(systems: Systems, name: str, measure: str) -> str:
    if name == "pseudo":
        return "#" if _differ(systems, "BM25", name, measure) else ""
    if name in ("BM25", "scratch") or "+" in name or "pseudo" not in systems:
        return ""
    return "*" if _differ(systems, "pseudo", name, measure) else ""


def _differ(systems: Systems, one: str, other: str, measure: str) -> bool:
    tables = [
        average_over_seeds([e.per_question for e in systems[n].values()]) for n in (one, other)
    ]
    # Of two that are equal on every question the p-value is no number, and they do not differ.
    return bool(stats.ttest_rel(*align_by_question(tables, measure)).pvalue < SIGNIFICANT)
