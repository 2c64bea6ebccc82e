"""What a study of starts and sizes shows: its curve (Figure 1) and its ends (Table 1).

Knows evaluations by the names that `pipelines.pseudo_label` gives systems. Must not know stages.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy import stats

from as2ray.evaluation import plots
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.seeds import align_by_question, average_over_seeds

SIGNIFICANT = 0.01
"""Of the paper's paired t-tests."""

Systems = Mapping[str, Mapping[int, EvaluationResult]]
"""Evaluations by system (`START`, `START+SIZE`, `BM25`) and sample."""


def curve(
    title: str, systems: Systems, sizes: Mapping[int | None, int], measure: str, path: Path
) -> None:
    """A measure over the number of annotated questions, a line a start; 0 is zero-shot.

    Args:
        title: Heading.
        systems: What was measured.
        sizes: Questions of each size; none is all.
        measure: Which one.
        path: Where to.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    for name, by_sample in systems.items():
        start, _, size = name.partition("+")
        if "," in name:
            continue  # a remedy: in the report
        places = [0] if not size else [sizes[None if size == "all" else int(size)]]
        if start == "BM25":
            places = [0, *sizes.values()]
        points = [(float(x), e.measures[measure]) for e in by_sample.values() for x in places]
        series.setdefault(start, []).extend(points)
    plots.learning_curve(series, title, "annotated questions", measure, path, log_x=True)


Ends = Mapping[str, Sequence[str]]
"""Zero-shot and full-shot of each start, as told, with the paper's marks; empty where there is
none."""


def ends(systems: Systems, sources: Sequence[str], measure: str) -> Ends:
    """What Table 1 says of one target.

    Args:
        systems: What was measured on it.
        sources: Starts that were trained on other corpora.
        measure: Which one.
    """
    found = {}
    for start in [*sources, "BM25", "pseudo", "scratch"]:
        found[start] = ["", ""]
        for place, name in enumerate((start, f"{start}+all")):
            if name in systems:
                value = average_over_seeds([e.per_question for e in systems[name].values()])
                mean = sum(value[measure].to_pylist()) / value.num_rows
                found[start][place] = f"{mean:.4f}{_mark(systems, name, measure)}"
    return found


def table_1(targets: Mapping[str, Ends], measure: str) -> str:
    """Zero-shot (ZS) and full-shot (FS) of each start on each target, as Markdown.

    Args:
        targets: By name; of one study or of several.
        measure: Which was measured.
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
