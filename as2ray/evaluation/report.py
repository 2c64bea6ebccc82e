"""A results table that can be believed: Markdown, and the same as JSON beside it.

Knows evaluations. Must not know how they came about: models, scores or corpora.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa

from as2ray.errors import EvaluationError
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.seeds import SeedSummary, average_over_seeds, summarize_seeds
from as2ray.evaluation.significance import PairedComparison, compare_systems, holm_correction
from as2ray.tables.schema import TableCounts

SIGNIFICANCE_LEVEL = 0.05
"""Adjusted p-value below which a difference bears the mark †."""


@dataclass(frozen=True)
class ReportRow:
    """One system."""

    system: str
    """Its name."""
    seeds: tuple[int, ...]
    """Seeds that were run; empty for a number that a paper prints."""
    measures: Mapping[str, SeedSummary]
    """Mean and deviation over the seeds."""
    comparisons: Mapping[str, PairedComparison] = field(default_factory=dict)
    """Test against the baseline by measure; empty for the baseline and for a paper's numbers."""
    p_holm: Mapping[str, float] = field(default_factory=dict)
    """Randomisation p-value by measure, adjusted over all tests of the report."""


@dataclass(frozen=True)
class Report:
    """Systems side by side on one table under one filter."""

    title: str
    baseline: str
    fingerprint: str
    question_filter: str
    ties: str
    relevance: str
    counts: TableCounts
    rows: tuple[ReportRow, ...]


def build_report(
    title: str,
    systems: Mapping[str, Mapping[int, EvaluationResult]],
    *,
    baseline: str,
    published_results: Mapping[str, Mapping[str, float]] | None = None,
    seed: int = 0,
) -> Report:
    """Means over seeds, every system tested against the baseline, Holm over all those tests.

    Args:
        title: Heading, such as "WikiQA test".
        systems: By system, its evaluations by seed.
        baseline: The system that the others are tested against.
        published: Numbers that papers print, by name and measure; set apart from what was run.
        seed: Draws of the tests.

    Raises:
        EvaluationError: No such baseline, or evaluations of other tables, filters or measures.
    """
    first = _check_comparable(systems, baseline)
    tables = {n: [e.per_question for e in runs.values()] for n, runs in systems.items()}
    tests = _compare_with_baseline(tables, first.measures, baseline, seed)
    adjusted = dict(zip(tests, holm_correction([test.p_randomization for test in tests.values()])))
    rows = [
        ReportRow(
            system=name,
            seeds=tuple(runs),
            measures={m: summarize_seeds(tables[name], m) for m in first.measures},
            comparisons={m: test for (n, m), test in tests.items() if n == name},
            p_holm={m: p for (n, m), p in adjusted.items() if n == name},
        )
        for name, runs in systems.items()
    ]
    for name, values in (published_results or {}).items():
        rows.append(ReportRow(name, (), {m: SeedSummary(v, None, 1) for m, v in values.items()}))
    kind = (first.fingerprint, first.question_filter, first.ties, first.relevance, first.counts)
    return Report(title, baseline, *kind, tuple(rows))


def to_markdown(report: Report) -> str:
    """The report as Markdown: results, tests, and what the numbers were computed on."""
    measures = list(report.rows[0].measures)
    results = [
        [
            _format_system(row, report),
            ", ".join(map(str, row.seeds)),
            *(_format_measure(row, m) for m in measures),
        ]
        for row in report.rows
    ]
    tests = [_format_test(row, test) for row in report.rows for test in row.comparisons.values()]
    parts = [f"### {report.title}", markdown_table(["system", "seeds", *measures], results)]
    if tests:
        parts.append(markdown_table(_TEST_COLUMNS, tests))
    return "\n\n".join([*parts, _format_footer(report)]) + "\n"


def save_report(report: Report, path: Path | str) -> None:
    """Writes Markdown to `path` and the same as JSON beside it, with the suffix .json."""
    path = Path(path)
    path.write_text(to_markdown(report), encoding="utf-8")
    content = json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False)
    path.with_suffix(".json").write_text(content + "\n", encoding="utf-8")


_TEST_COLUMNS = [
    "system",
    "measure",
    "difference",
    "interval",
    "effect",
    "p",
    "Holm",
    "t",
    "Wilcoxon",
]


def _compare_with_baseline(
    systems: Mapping[str, Sequence[pa.Table]], measures: Iterable[str], baseline: str, seed: int
) -> dict[tuple[str, str], PairedComparison]:
    averaged = {name: average_over_seeds(runs) for name, runs in systems.items()}
    return {
        (name, measure): compare_systems(averaged[baseline], averaged[name], measure, seed=seed)
        for name in systems
        for measure in measures
        if name != baseline
    }


def _check_comparable(
    systems: Mapping[str, Mapping[int, EvaluationResult]], baseline: str
) -> EvaluationResult:
    runs = [run for by_seed in systems.values() for run in by_seed.values()]
    if baseline not in systems or not all(systems.values()):
        raise EvaluationError(
            f"baseline {baseline!r} and systems {list(systems)}"
            "; expected the baseline among the systems, and at least one seed for each",
            fix="name an evaluated system as the baseline",
        )
    kinds = {
        (r.fingerprint, r.question_filter, r.ties, r.relevance, tuple(r.measures)) for r in runs
    }
    if len(kinds) > 1:
        raise EvaluationError(
            f"evaluations of {len(kinds)} kinds: {sorted(kinds)}"
            "; expected one table, filter, ties, relevance and list of measures",
            fix="evaluate all systems in the same way, or make a report for each",
        )
    return runs[0]


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


def _format_test(row: ReportRow, test: PairedComparison) -> list[str]:
    low, high = test.interval
    return [
        row.system,
        test.measure,
        f"{test.difference:+.4f}",
        f"[{low:+.4f}, {high:+.4f}]",
        "" if test.effect_size is None else f"{test.effect_size:+.2f}",
        f"{test.p_randomization:.4f}",
        f"{row.p_holm[test.measure]:.4f}",
        f"{test.p_t:.2g}",
        f"{test.p_wilcoxon:.2g}",
    ]


def _format_footer(report: Report) -> str:
    tests = [test for row in report.rows for test in row.comparisons.values()]
    lines = [
        f"{report.counts} under the filter `{report.question_filter}`; relevance `{report.relevance}`, "
        f"ties {report.ties}; table `{report.fingerprint}`.",
    ]
    if any(len(row.seeds) > 1 for row in report.rows):
        lines.append("Mean ± standard deviation over seeds.")
    if tests:
        lines.append(
            f"Tests against {report.baseline}, paired by question. p: randomisation test; Holm: "
            f"the same, adjusted over {len(tests)} tests, † where below {SIGNIFICANCE_LEVEL}; t, "
            f"Wilcoxon: p-values. Interval: {tests[0].confidence:.0%}, bootstrap. "
            f"Effect: mean over standard deviation of the differences."
        )
    return " ".join(lines)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)
