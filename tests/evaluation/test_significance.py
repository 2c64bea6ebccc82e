import warnings

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from as2ray.errors import EvaluationError
from as2ray.evaluation import significance
from as2ray.evaluation.seeds import average_over_seeds, summarize_seeds
from as2ray.evaluation.significance import compare_systems, holm_correction


def per_question(values, ids=None):
    ids = [f"q{i}" for i in range(len(values))] if ids is None else ids
    return pa.table({"question_id": ids, "AP": np.asarray(values, np.float64)})


@pytest.fixture
def random():
    return np.random.default_rng(7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[0.2, 0.4, 1.0], [1.0, 1.0, 1.0]])
def test_identical_systems_differ_in_nothing(values):
    result = compare_systems(per_question(values), per_question(values), "AP")
    assert (result.p_randomization, result.p_t, result.p_wilcoxon) == (1.0, 1.0, 1.0)
    assert (result.difference, result.interval, result.effect_size) == (0.0, (0.0, 0.0), 0.0)


@pytest.mark.filterwarnings("error")
def test_same_difference_everywhere_is_significant_without_nan():
    before = np.linspace(0, 0.8, 12)
    result = compare_systems(per_question(before), per_question(before + 0.1), "AP")
    assert result.p_randomization == pytest.approx(2 / 2**12)
    assert result.p_t == 0.0
    assert result.p_wilcoxon < 0.001
    assert result.interval == pytest.approx((0.1, 0.1))
    assert result.effect_size is None


@pytest.mark.filterwarnings("error")
def test_constant_baseline_is_compared_without_warnings(random):
    constant, system = per_question(np.zeros(20)), per_question(random.random(20))
    for pair in ((constant, system), (system, constant)):
        result = compare_systems(*pair, "AP")
        assert max(result.p_randomization, result.p_t, result.p_wilcoxon) < 0.001
        assert (result.spearman, result.p_spearman) == (None, None)


@pytest.mark.parametrize("questions", [2, 3, 8, 10, 40, 60])
def test_wilcoxon_test_of_few_questions_with_ties_is_scipy_s(random, questions):
    for differences in (
        random.normal(size=questions),
        random.integers(-2, 3, questions) / 4,
        np.eye(1, questions)[0],
    ):
        result = compare_systems(per_question(np.zeros(questions)), per_question(differences), "AP")
        expected = stats.wilcoxon(differences).pvalue if differences.any() else 1.0
        assert result.p_wilcoxon == pytest.approx(expected, abs=1e-12)


def test_clearly_better_system_has_small_p_and_interval_above_zero(random):
    before = random.random(100) * 0.5
    after = before + 0.2 + random.normal(size=100) * 0.1
    result = compare_systems(per_question(before), per_question(after), "AP")
    assert max(result.p_randomization, result.p_t, result.p_wilcoxon) < 0.001
    assert result.difference == pytest.approx(after.mean() - before.mean())
    assert 0.15 < result.interval[0] < result.difference < result.interval[1] < 0.25
    differences = after - before
    assert result.effect_size == pytest.approx(differences.mean() / differences.std(ddof=1))
    assert result.p_t == pytest.approx(stats.ttest_rel(after, before).pvalue, rel=1e-6, abs=0)


def test_random_signs_give_nearly_the_p_value_of_all_signs():
    values = np.linspace(-0.3, 0.45, 16) ** 3
    exact = significance._randomization_p_value(values, np.inf, 0)
    assert 0.1 < exact < 0.8
    assert significance._randomization_p_value(values, 20_000, 1) == pytest.approx(exact, abs=0.02)


def test_few_questions_are_tested_exactly():
    result = compare_systems(per_question([0.0, 0.0, 0.0]), per_question([0.3, 0.2, 0.4]), "AP")
    assert result.p_randomization == pytest.approx(2 / 2**3)


def test_p_values_under_the_null_are_about_uniform(random):
    pairs = [random.random((2, 40)) for _ in range(200)]
    p = [
        compare_systems(per_question(a), per_question(b), "AP", num_resamples=400).p_randomization
        for a, b in pairs
    ]
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.09


def test_same_seed_gives_same_numbers(random):
    tables = per_question(random.random(60)), per_question(random.random(60))
    assert compare_systems(*tables, "AP", seed=3) == compare_systems(*tables, "AP", seed=3)
    assert compare_systems(*tables, "AP", seed=3) != compare_systems(*tables, "AP", seed=4)
    assert compare_systems(*tables, "AP") == compare_systems(*tables, "AP", seed=0)


def test_questions_are_paired_by_id_not_by_place():
    before = per_question([0.1, 0.5, 0.9], ["a", "b", "c"])
    after = per_question([0.9, 0.1, 0.5], ["c", "a", "b"])
    assert compare_systems(before, after, "AP").p_t == 1.0


def test_holm_equals_hand_computation():
    assert holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_correction([0.8, 0.02, 0.6]) == pytest.approx([1.0, 0.06, 1.0])
    assert holm_correction([]) == []
    with pytest.raises(EvaluationError, match="1 of 2 p-values"):
        holm_correction([0.5, float("nan")])
    with pytest.raises(EvaluationError, match=r"first 1\.5"):
        holm_correction([1.5])
    assert holm_correction([0, 1]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["q0", "q1", "other"], "1 missing .*q2.* 1 other .*other"),
        (["q0", "q1"], "3 and 2 questions"),
        (["q0", "q1", "q1"], r"2 distinct\): 1 missing"),
    ],
)
def test_other_questions_are_refused_with_numbers(ids, said):
    with pytest.raises(EvaluationError, match=said):
        compare_systems(per_question([0.1, 0.2, 0.3]), per_question([0.5] * len(ids), ids), "AP")


def test_unknown_measure_or_single_question_is_refused():
    with pytest.raises(EvaluationError, match="no measure 'RR'"):
        compare_systems(per_question([0.1, 0.2]), per_question([0.1, 0.2]), "RR")
    with pytest.raises(EvaluationError, match="the tables have 1"):
        compare_systems(per_question([0.1]), per_question([0.2]), "AP")


def test_seeds_are_averaged_by_question_and_spread_over_means():
    seeds = [per_question([0.0, 0.4], ["b", "a"]), per_question([0.8, 0.6], ["a", "b"])]
    assert average_over_seeds(seeds).to_pylist() == [
        {"question_id": "a", "AP": pytest.approx(0.6)},
        {"question_id": "b", "AP": pytest.approx(0.3)},
    ]
    result = summarize_seeds(seeds, "AP")
    assert (result.mean, result.num_seeds) == (pytest.approx(0.45), 2)
    assert result.std == pytest.approx(np.std([0.2, 0.7], ddof=1))
    assert summarize_seeds(seeds[:1], "AP").std is None
    with pytest.raises(EvaluationError, match="at least one seed"):
        average_over_seeds([])


def test_many_questions_do_not_warn_or_exhaust_memory(random):
    table = per_question(random.random(20_000))
    other = per_question(random.random(20_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 < compare_systems(table, other, "AP", num_resamples=500).p_randomization <= 1


def test_correlation_with_the_baseline_is_spearman_s_with_its_p(random):
    values = random.random(40)
    baseline, system = per_question(values), per_question(values**3)
    comparison = compare_systems(baseline, system, "AP")
    assert comparison.spearman == pytest.approx(1.0)
    assert comparison.p_spearman < 0.01
    assert compare_systems(per_question([0.5] * 40), system, "AP").spearman is None


def test_interval_is_as_wide_as_its_confidence_asks(random):
    values = per_question(np.zeros(50)), per_question(random.normal(size=50))
    wide, narrow = (
        np.ptp(compare_systems(*values, "AP", confidence=level).interval) for level in (0.95, 0.5)
    )
    assert narrow / wide == pytest.approx(0.674 / 1.96, rel=0.1)  # of a normal distribution
