from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from as2ray.errors import EvaluationError
from as2ray.evaluation.loss_bounds import ComparedCascade, compare_losses, format_losses


def per_question(values) -> pa.Table:
    ids = [f"q{i}" for i in range(len(values))]
    return pa.table({"question_id": ids, "AP": np.asarray(values, np.float64)})


def compared(test: str, differences, cost=0.5, max_cost=0.6) -> ComparedCascade:
    """A cascade of two seeds whose questions differ by these values in the mean."""
    before = np.full(len(differences), 0.5)
    after = [per_question(before + np.asarray(differences) + shift) for shift in (0.1, -0.1)]
    costs = [cost - 0.1, cost + 0.1]
    return ComparedCascade(
        test, "joint", "ranker", after, [per_question(before)] * 2, costs, max_cost
    )


def test_rows_have_the_means_over_seeds_and_all_questions_are_pooled():
    long, short = np.full(150, 0.002), np.full(50, -0.006)
    rows = compare_losses([compared("long", long), compared("short", short)])
    assert [row.test for row in rows] == ["long", "short", "all"]
    assert [row.comparison.num_questions for row in rows] == [150, 50, 200]
    assert [row.comparison.difference for row in rows] == pytest.approx([0.002, -0.006, 0.0])
    assert rows[0].cost == pytest.approx(0.5)
    assert [row.is_met for row in rows] == [True, True, True]
    assert (rows[2].systems, rows[2].cost, rows[2].seeds) == ("long, short", None, 2)


@pytest.mark.parametrize(
    ("differences", "cost", "is_met"),
    [
        (np.full(100, -0.004), 0.6, True),
        (np.full(100, -0.004), 0.61, False),
        (np.full(100, -0.006), 0.5, False),
        (np.full(99, -0.009), 0.5, True),
        (np.full(99, -0.011), 0.5, False),
        (np.tile([0.4, -0.4], 50), 0.5, False),  # The mean is 0, the interval wide.
        (np.tile([0.4, -0.4], 49), 0.5, True),
    ],
)
def test_mean_interval_and_cost_have_bounds(differences, cost, is_met):
    row, _ = compare_losses([compared("test", differences, cost)])
    assert row.is_met == is_met


def test_pooled_questions_have_the_interval_s_bound_however_few_each_test_has():
    wide = np.tile([0.4, -0.4], 30)
    *_, pooled = compare_losses([compared("a", wide), compared("b", wide)])
    assert pooled.comparison.interval[0] < -0.015
    assert not pooled.is_met


def test_report_prints_costs_and_whether_bounds_are_met():
    rows = compare_losses([compared("a", np.full(120, -0.02)), compared("b", np.zeros(120))])
    text = format_losses(rows)
    names = "test systems seeds questions ranker cascade difference interval operations met"
    assert text.splitlines()[0] == f"| {' | '.join(names.split())} |"
    assert "|  | no |" in text.splitlines()[4]  # all together have no operations
    assert "| a | joint against ranker | 2 | 120 | 0.5000 | 0.4800 | -0.0200 |" in text
    assert "50.0% (at most 60%) | no |" in text.splitlines()[2]
    assert "yes |" in text.splitlines()[3]
    assert "fewer than 100 questions only the mean" in text


def test_cascade_of_other_seeds_or_none_is_refused():
    fewer = compared("a", np.zeros(20))
    fewer = replace(fewer, cascade_values=fewer.cascade_values[:1])
    with pytest.raises(EvaluationError, match="'joint' has 1 seeds on 'a', 'ranker' has 2"):
        compare_losses([fewer])
    with pytest.raises(EvaluationError, match="no cascade is compared"):
        compare_losses([])
