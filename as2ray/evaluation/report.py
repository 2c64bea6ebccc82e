"""Reports of evaluated systems as Markdown and JSON, with significance tests."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from as2ray.errors import EvaluationError
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.seeds import SeedSummary, average_over_seeds, summarize_seeds
from as2ray.tables.schema import TableCounts

if TYPE_CHECKING:
    from as2ray.evaluation.significance import PairedComparison

MAX_CONSOLE_ROWS = 5
"""Most systems that the short form of a report lists."""

PARAMETERS = "parameters"
"""Key of the number of weights in a published result, beside its measures."""

SIGNIFICANCE_LEVEL = 0.05
"""Adjusted p-value below which a difference is marked with †."""


@dataclass(frozen=True)
class ReportRow:
    """Results of a system."""

    system: str
    """Name of the system."""
    seeds: tuple[int, ...]
    """Seeds that were run; empty for published results."""
    measures: Mapping[str, SeedSummary]
    """Mean and deviation over the seeds, by measure."""
    parameters: int | None = None
    """Number of weights; None where there are none, or they are not known."""
    comparisons: Mapping[str, "PairedComparison"] = field(default_factory=dict)
    """Test against the baseline, by measure; empty for the baseline and for published results."""
    p_holm: Mapping[str, float] = field(default_factory=dict)
    """Randomization p-value, by measure, adjusted over all tests of the report."""


@dataclass(frozen=True)
class Report:
    """Results of several systems on one table with one filter."""

    title: str
    baseline: str
    fingerprint: str
    question_filter: str
    ties: str
    relevance: str
    counts: TableCounts
    rows: tuple[ReportRow, ...]
    reproduces: Mapping[str, str] = field(default_factory=dict)
    """Name of the published result that a system reproduces, by system."""


def build_report(
    title: str,
    systems: Mapping[str, Mapping[int, EvaluationResult]],
    *,
    baseline: str,
    published_results: Mapping[str, Mapping[str, float]] | None = None,
    parameters: Mapping[str, int] | None = None,
    reproduces: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Report:
    """Averages over seeds and tests every system against the baseline, with Holm's correction.

    Args:
        title: Heading, such as "WikiQA test".
        systems: Evaluations of each system by seed.
        baseline: The system that the others are tested against.
        published_results: Results from papers, by name and measure; they are not tested. The key
            `parameters` is a number of weights.
        parameters: Number of weights by system.
        reproduces: Name of the published result that a system reproduces, by system.
        seed: Seed of the tests.

    Raises:
        EvaluationError: No such baseline, or different tables, filters or measures.
    """
    # SciPy's tests take a second to load.
    from as2ray.evaluation.significance import compare_systems, holm_correction

    first = _check_comparable(systems, baseline)
    tables = {
        name: [result.per_question for result in by_seed.values()]
        for name, by_seed in systems.items()
    }
    averaged = {name: average_over_seeds(by_seed) for name, by_seed in tables.items()}
    tests = {
        (name, measure): compare_systems(averaged[baseline], averaged[name], measure, seed=seed)
        for name, measure in product(systems, first.measures)
        if name != baseline
    }
    adjusted = dict(zip(tests, holm_correction([test.p_randomization for test in tests.values()])))
    rows = [
        ReportRow(
            system=name,
            seeds=tuple(by_seed),
            measures={m: summarize_seeds(tables[name], m) for m in first.measures},
            parameters=(parameters or {}).get(name),
            comparisons={m: test for (n, m), test in tests.items() if n == name},
            p_holm={m: p for (n, m), p in adjusted.items() if n == name},
        )
        for name, by_seed in systems.items()
    ]
    for name, values in (published_results or {}).items():
        printed = {m: SeedSummary(v, None, 1) for m, v in values.items() if m != PARAMETERS}
        size = int(values[PARAMETERS]) if PARAMETERS in values else None
        rows.append(ReportRow(name, (), printed, size))
    settings = first.fingerprint, first.question_filter, first.ties, first.relevance
    return Report(title, baseline, *settings, first.counts, tuple(rows), reproduces or {})


def to_markdown(report: Report) -> str:
    """Formats the report as Markdown: results, tests, and how they were computed."""
    measures = list(report.rows[0].measures)
    results, has_parameters = [], any(row.parameters for row in report.rows)
    for row in report.rows:
        seeds = ", ".join(map(str, row.seeds))
        values = [_format_measure(row, measure) for measure in measures]
        if has_parameters:
            values.append(_format_size(row.parameters) if row.parameters else "")
        results.append([_format_system(row, report), seeds, *values])
    columns = ["system", "seeds", *measures, *[PARAMETERS] * has_parameters]
    tests = [_format_test(row, test) for row in report.rows for test in row.comparisons.values()]
    parts = [f"### {report.title}", markdown_table(columns, results)]
    if tests:
        parts.append(markdown_table(list(tests[0]), [list(test.values()) for test in tests]))
    if cells := _compare_with_published(report):
        names = ("system", "measure", "published", "ours", "difference", "claim")
        parts += [
            "Beside the paper; the last column says whether the system is on the same side of "
            f"{report.baseline} as there.",
            markdown_table(names, cells),
        ]
    return "\n\n".join([*parts, _format_footer(report)]) + "\n"


def to_summary(report: Report, path: Path | str, best: str = "", keep: Iterable[str] = ()) -> str:
    """Formats the best system beside its baselines as Markdown, and says where the rest is.

    Args:
        report: All results.
        path: File of the whole report.
        best: The system to list as the best; if there is none of this name, the one with the
            highest first measure.
        keep: Other systems to list besides the baseline, such as BM25.
    """
    measures = list(report.rows[0].measures)
    rows = {row.system: row for row in report.rows}
    ours = [row for row in report.rows if row.seeds]
    if best not in rows:
        best = max(ours, key=lambda row: row.measures[measures[0]].mean).system
    if len(rows) > MAX_CONSOLE_ROWS:
        listed = {report.baseline, best, *keep}
        listed |= {report.reproduces[name] for name in listed if name in report.reproduces}
        rows = {name: row for name, row in rows.items() if name in listed}
    cells = [
        [_format_system(row, report), *(_format_measure(row, measure) for measure in measures)]
        for row in rows.values()
    ]
    count = len(report.rows) - len(rows)
    more = f"{count} more systems, the tests" if count else "The tests"
    text = markdown_table(["system", *measures], cells)
    return f"### {report.title}\n\n{text}\n\n{_describe_best(report, best)}{more}: {path}\n"


def _describe_best(report: Report, best: str) -> str:
    """Returns a sentence on the test of a system against the baseline; empty for the baseline."""
    row = next(row for row in report.rows if row.system == best)
    if not row.comparisons:
        return ""
    measure, test = next(iter(row.comparisons.items()))
    low, high = test.interval
    return (
        f"{best}: {measure} {test.difference:+.4f} [{low:+.4f}, {high:+.4f}] against "
        f"{report.baseline}, p {row.p_holm[measure]:.4f} (Holm). "
    )


def save_report(report: Report, path: Path | str) -> None:
    """Writes the report as Markdown to `path`, and as JSON beside it with the suffix .json."""
    path = Path(path)
    path.write_text(to_markdown(report), encoding="utf-8")
    content = json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False)
    path.with_suffix(".json").write_text(content + "\n", encoding="utf-8")


def _check_comparable(
    systems: Mapping[str, Mapping[int, EvaluationResult]], baseline: str
) -> EvaluationResult:
    if baseline not in systems or not all(systems.values()):
        raise EvaluationError(
            f"baseline {baseline!r} and systems {list(systems)}; the baseline must be one of the "
            "systems, and every system needs a seed"
        )
    results = [result for by_seed in systems.values() for result in by_seed.values()]
    settings = {
        (r.fingerprint, r.question_filter, r.ties, r.relevance, tuple(r.measures)) for r in results
    }
    if len(settings) > 1:
        raise EvaluationError(
            f"the systems differ in table, filter, ties, relevance or measures: {sorted(settings)}",
            fix="evaluate all systems with the same settings, or make several reports",
        )
    return results[0]


def _format_system(row: ReportRow, report: Report) -> str:
    if not row.seeds:
        return f"*{row.system}, as printed*"
    return f"{row.system} (baseline)" if row.system == report.baseline else row.system


def _format_measure(row: ReportRow, measure: str) -> str:
    if measure not in row.measures:
        return ""
    value = row.measures[measure]
    mark = " †" if row.p_holm.get(measure, 1.0) < SIGNIFICANCE_LEVEL else ""
    deviation = "" if value.std is None else f" ± {value.std:.4f}"
    return f"{value.mean:.4f}{deviation}{mark}"


def _format_test(row: ReportRow, test: "PairedComparison") -> dict[str, str]:
    """Returns the cells of a test by column."""
    low, high = test.interval
    return {
        "system": row.system,
        "measure": test.measure,
        "difference": f"{test.difference:+.4f}",
        "interval": f"[{low:+.4f}, {high:+.4f}]",
        "effect": "" if test.effect_size is None else f"{test.effect_size:+.2f}",
        "p": f"{test.p_randomization:.4f}",
        "Holm": f"{row.p_holm[test.measure]:.4f}",
        "t": f"{test.p_t:.2g}",
        "Wilcoxon": f"{test.p_wilcoxon:.2g}",
        "Spearman": (
            "" if test.spearman is None else f"{test.spearman:+.2f} ({test.p_spearman:.2g})"
        ),
    }


def _compare_with_published(report: Report) -> list[tuple[str, ...]]:
    """Returns a row for each cell of the paper that is reproduced."""
    rows = {row.system: row for row in report.rows}
    pairs = {ours: (rows.get(ours), rows.get(name)) for ours, name in report.reproduces.items()}
    means = {
        (system, measure): (published.measures[measure].mean, row.measures[measure].mean)
        for system, (row, published) in pairs.items()
        if row and row.seeds and published
        for measure in published.measures
        if measure in row.measures
    }
    cells: list[tuple[str, ...]] = []
    for (system, measure), (theirs, ours) in means.items():
        claim, baseline = "", means.get((report.baseline, measure))
        if baseline and system != report.baseline:
            holds = (theirs > baseline[0]) == (ours > baseline[1])
            claim = "holds" if holds else "does not hold"
        values = (f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.4f}")
        cells.append((system, measure, *values, claim))
    for system, (row, published) in pairs.items():
        if row and published and row.parameters and published.parameters:
            sizes = map(_format_size, (published.parameters, row.parameters))
            difference = f"{(row.parameters - published.parameters) / 1e6:+.1f}M"
            cells.append((system, PARAMETERS, *sizes, difference, ""))
    return cells


def _format_size(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def _format_footer(report: Report) -> str:
    tests = [test for row in report.rows for test in row.comparisons.values()]
    lines = [
        f"{report.counts} under the filter `{report.question_filter}`; "
        f"relevance `{report.relevance}`, ties {report.ties}; table `{report.fingerprint}`."
    ]
    if any(len(row.seeds) > 1 for row in report.rows):
        lines.append("Mean ± standard deviation over seeds.")
    if tests:
        lines.append(
            f"Tests against {report.baseline}, paired by question. p: randomization test; Holm: "
            f"the same, adjusted over {len(tests)} tests, † if below {SIGNIFICANCE_LEVEL}; t, "
            "Wilcoxon: p-values; Spearman: correlation over questions, and its p. "
            f"Interval: {tests[0].confidence:.0%}, bootstrap. "
            "Effect: mean divided by standard deviation of the differences."
        )
    return " ".join(lines)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table, without a line break at its end.

    Args:
        columns: Names of the columns.
        rows: Cells of each row; `|` is escaped.
    """
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)
