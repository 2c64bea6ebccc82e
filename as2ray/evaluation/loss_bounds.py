"""What cascades lose against their rankers: paired differences, pooled over seeds and tests.

The seeds of a question are averaged first, because they are not independent questions; then the
questions of all tests are one sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from as2ray.errors import EvaluationError
from as2ray.evaluation.report import markdown_table
from as2ray.evaluation.seeds import average_over_seeds
from as2ray.evaluation.significance import PairedComparison, compare_systems

MIN_DIFFERENCE = -0.005
"""Lowest mean difference of a test and of all tests together."""
MIN_LOWER_END = -0.015
"""Lowest lower end of the 95 % interval of the difference."""
MIN_QUESTIONS = 100
"""A test with fewer questions has no interval of use; its mean alone is judged."""
MIN_DIFFERENCE_OF_FEW = -0.01
"""Lowest mean difference of such a test."""


@dataclass(frozen=True)
class ComparedCascade:
    """A cascade and its ranker on one test, by seed."""

    test: str
    cascade: str
    baseline: str
    cascade_values: Sequence[pa.Table]
    """One table of per-question values for each seed, as in `EvaluationResult.per_question`."""
    baseline_values: Sequence[pa.Table]
    """The same for the ranker; as many seeds."""
    costs: Sequence[float]
    """Operations relative to the ranker's, of each seed."""
    max_cost: float
    """Highest mean cost."""


@dataclass(frozen=True)
class LossRow:
    """A line of the report: a test, or all of them."""

    test: str
    systems: str
    seeds: int
    comparison: PairedComparison
    cost: float | None
    """Mean over the seeds; None for all tests together."""
    max_cost: float | None
    is_met: bool
    """Whether difference, interval and cost are within their bounds."""


def compare_losses(cascades: Sequence[ComparedCascade], measure: str = "AP") -> list[LossRow]:
    """Compares cascades with their rankers: a row for each test, and one for all of them.

    Args:
        cascades: One for each test.
        measure: Measure whose differences are bounded.

    Raises:
        EvaluationError: No cascade, other questions of its ranker, or another number of seeds.
    """
    rows: list[LossRow] = []
    pooled: dict[str, list[pa.Table]] = {"baseline": [], "cascade": []}
    for each in cascades:
        if len(each.cascade_values) != len(each.baseline_values):
            raise EvaluationError(
                f"{each.cascade!r} has {len(each.cascade_values)} seeds on {each.test!r}, "
                f"{each.baseline!r} has {len(each.baseline_values)}",
                fix="train both with the same seeds",
            )
        tables = {
            "baseline": average_over_seeds(each.baseline_values),
            "cascade": average_over_seeds(each.cascade_values),
        }
        comparison = compare_systems(tables["baseline"], tables["cascade"], measure)
        cost = sum(each.costs) / len(each.costs)
        is_large = comparison.num_questions >= MIN_QUESTIONS
        has_small_loss = comparison.difference >= (
            MIN_DIFFERENCE if is_large else MIN_DIFFERENCE_OF_FEW
        )
        is_certain = not is_large or comparison.interval[0] >= MIN_LOWER_END
        systems = f"{each.cascade} against {each.baseline}"
        is_met = has_small_loss and is_certain and cost <= each.max_cost
        num_seeds = len(each.costs)
        rows.append(LossRow(each.test, systems, num_seeds, comparison, cost, each.max_cost, is_met))
        for name, table in tables.items():
            ids = [f"{each.test} {id}" for id in table["question_id"].to_pylist()]
            pooled[name].append(pa.table({"question_id": ids, measure: table[measure]}))
    if not rows:
        raise EvaluationError("no cascade is compared; at least one test is needed")
    comparison = compare_systems(
        pa.concat_tables(pooled["baseline"]), pa.concat_tables(pooled["cascade"]), measure
    )
    is_met = comparison.difference >= MIN_DIFFERENCE and comparison.interval[0] >= MIN_LOWER_END
    num_seeds = min(row.seeds for row in rows)
    tests = ", ".join(row.test for row in rows)
    return [*rows, LossRow("all", tests, num_seeds, comparison, None, None, is_met)]


def format_losses(rows: Sequence[LossRow]) -> str:
    """Formats the rows as a Markdown table with the bounds below it."""
    cells = [_format_row(row) for row in rows]
    first = rows[0].comparison
    footer = (
        f"{first.measure}, means over the seeds; differences are paired by question, intervals "
        f"({first.confidence:.0%}) are by bootstrap over questions. Bounds: mean difference at "
        f"least {MIN_DIFFERENCE:+.3f}, lower end at least {MIN_LOWER_END:+.3f}; of a test with "
        f"fewer than {MIN_QUESTIONS} questions only the mean, at least "
        f"{MIN_DIFFERENCE_OF_FEW:+.3f}."
    )
    return f"{markdown_table(tuple(cells[0]), [tuple(row.values()) for row in cells])}\n\n{footer}"


def _format_row(row: LossRow) -> Mapping[str, str]:
    test = row.comparison
    low, high = test.interval
    cost = "" if row.cost is None else f"{row.cost:.1%} (at most {row.max_cost:.0%})"
    return {
        "test": row.test,
        "systems": row.systems,
        "seeds": str(row.seeds),
        "questions": str(test.num_questions),
        "ranker": f"{test.baseline_mean:.4f}",
        "cascade": f"{test.system_mean:.4f}",
        "difference": f"{test.difference:+.4f}",
        "interval": f"[{low:+.4f}, {high:+.4f}]",
        "operations": cost,
        "met": "yes" if row.is_met else "no",
    }
