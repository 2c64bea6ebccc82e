from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from as2ray.errors import EvaluationError
from as2ray.tables.reliability import measure_abstention, measure_reliability
from as2ray.tables.score_checks import check_binary_labels, check_probabilities


def test_reliability_equals_a_count_by_hand():
    scores, labels = np.array([0.05, 0.15, 0.95, 1.0]), np.array([0, 1, 1, 1])
    reliability = measure_reliability(scores, labels, num_bins=2)
    assert reliability.mean_scores == pytest.approx((0.1, 0.975))
    assert (reliability.accuracy, reliability.bin_counts) == ((0.5, 1.0), (2, 2))
    assert reliability.ece == pytest.approx((0.4 + 0.025) / 2)
    assert reliability.brier == pytest.approx((0.05**2 + 0.85**2 + 0.05**2) / 4)


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.integers(0, 1)), min_size=1),
    st.sampled_from([0.12, 0.3, 0.5, 0.75]),
)
def test_abstention_answers_larger_shares_while_each_is_sure_of_the_precision(pairs, precision):
    best, right = np.array([b for b, _ in pairs]), np.array([r for _, r in pairs])
    ranked = sorted(best, reverse=True)
    # Of equal numbers of questions one is tested.
    sizes = [ceil(len(best) * 2 ** (third / 3)) for third in range(-18, 1)]
    scores = list(dict.fromkeys(ranked[size - 1] for size in sizes))

    def is_sure(score: float, number_right: int) -> bool:
        """At the bound, as many right answers or more come with a probability of 0.05."""
        number = int((best >= score).sum())
        return number_right > 0 and binom.sf(number_right - 1, number, precision) <= 0.05

    possible = [is_sure(score, int((best >= score).sum())) for score in scores]
    first, passed = possible.index(True) if any(possible) else len(scores), []
    for start in (first, (first + len(scores)) // 2):
        for score in scores[start:]:
            if not is_sure(score, int(right[best >= score].sum())):
                break
            passed.append(score)
    threshold = min(passed, default=None)
    abstention = measure_abstention(best, right, precision, high_confidence=True)
    assert abstention.threshold == threshold
    if threshold is not None:
        assert abstention.reachable_precision >= precision
    reachable = abstention.reachable_precision
    if reachable:
        again = measure_abstention(best, right, reachable, high_confidence=True)
        assert again.threshold is not None


@pytest.mark.parametrize("precision", [0.5, 0.9])
def test_threshold_of_answers_that_are_too_often_wrong_is_rare(precision):
    """Scores that tell nothing, and a share of right answers just below the precision."""
    random, num_found = np.random.default_rng(0), 0
    for _ in range(400):
        right = (random.random(200) < precision - 1e-9).astype(int)
        abstention = measure_abstention(random.random(200), right, precision, high_confidence=True)
        num_found += abstention.threshold is not None
    assert 0 < num_found / 400 < 0.1 + 3 * np.sqrt(0.1 * 0.9 / 400)


def test_wrong_answers_at_first_do_not_hide_a_threshold_further_on():
    right, scores = np.array([0, 0, *[1] * 58, *[0] * 40]), np.linspace(0.9, 0.1, 100)

    def find_threshold(right, precision):
        return measure_abstention(scores, right, precision, high_confidence=True).threshold

    assert find_threshold(right, 0.8) == scores[62]  # of 80, 58 are too few
    assert find_threshold(1 - right, 0.8) is None
    assert find_threshold(np.ones(100, int), 1.0) is None


def test_threshold_is_the_lowest_score_from_which_on_enough_answers_are_right():
    best = np.array([0.2, 0.9, 0.8, 0.5, 0.5, 0.1])
    right = np.array([1, 0, 1, 1, 0, 0])
    assert measure_abstention(best, right, 0.5).threshold == 0.1  # 0, 1, 2 of 4, 3 of 5, 3 of 6
    assert measure_abstention(best, right, 0.6).threshold == 0.2
    assert measure_abstention(best, right, 0.61).threshold is None
    assert measure_abstention(best, right, 0.61).reachable_precision == 0.6
    assert measure_abstention(best, 1 - right, 0.5).threshold == 0.1
    assert measure_abstention(best, 1 - right, 0.9).threshold == 0.9


def test_new_questions_reach_the_precision_on_average():
    random, precisions = np.random.default_rng(0), []
    for _ in range(200):
        score, new_score = random.random(100), random.random(10_000)
        right, new_right = random.random(100) < score, random.random(10_000) < new_score
        threshold = measure_abstention(score, right.astype(int), 0.7).threshold
        precisions.append(new_right[new_score >= threshold].mean())
    assert abs(np.mean(precisions) - 0.7) < 0.02


def test_risk_is_the_share_of_wrong_answers_among_the_most_probable_ones():
    best, right = np.array([0.9, 0.8, 0.8, 0.1]), np.array([1, 1, 0, 0])
    abstention = measure_abstention(best, right, 0.5)
    assert abstention.coverage.tolist() == [0.25, 0.75, 1.0]
    assert abstention.risk == pytest.approx([0, 1 / 3, 0.5])
    assert abstention.aurc == pytest.approx(0.5 * 1 / 3 + 0.25 * 0.5)
    assert abstention.precision_at(0.5) == abstention.precision_at(0.75) == pytest.approx(2 / 3)
    assert abstention.precision_at(1.0) == 0.5


def test_calibration_error_weighs_each_bin_by_its_pairs():
    scores, labels = np.array([0.05, 0.05, 0.05, 0.95]), np.zeros(4)
    assert measure_reliability(scores, labels).ece == pytest.approx((3 * 0.05 + 0.95) / 4)


def test_scores_on_the_edge_of_a_bin_belong_to_the_upper_one():
    scores, labels = np.array([0.0, 0.5, 1.0]), np.array([0, 0, 1])
    assert measure_reliability(scores, labels, num_bins=2).bin_counts == (1, 2)
    assert measure_reliability(scores, labels).bin_counts == (1, 1, 1)
    fine = (np.arange(15) + 0.5) / 15
    assert measure_reliability(fine, np.zeros(15)).bin_counts == (1,) * 15
    finer = (np.arange(16) + 0.5) / 16
    assert sorted(measure_reliability(finer, np.zeros(16)).bin_counts) == [*[1] * 14, 2]
    low = measure_reliability(np.array([0.1, 0.1]), np.array([0, 1]))
    assert (low.mean_scores, low.accuracy, low.bin_counts) == ((0.1,), (0.5,), (2,))


def test_scores_and_labels_fit_each_other():
    check_probabilities(np.array([0.0, 1.0]), np.array([1, 1]))
    for scores in ([], [0.5], [0.5, -0.1], [0.5, 1.1], [0.5, np.nan]):
        with pytest.raises(EvaluationError, match=f"^{len(scores)} scores from .* for 2 labels"):
            check_probabilities(np.array(scores), np.array([0, 1]))
    with pytest.raises(EvaluationError, match="0 scores"):
        check_probabilities(np.array([]), np.array([]))
    check_binary_labels(np.array([0, 1]))
    for labels, problem in (([1, 1], "all of 2 labels are 1"), ([], "all of 0 labels are None")):
        with pytest.raises(EvaluationError, match=problem):
            check_binary_labels(np.array(labels))
    with pytest.raises(EvaluationError, match=r"0 or 1, not \[0, 2, 3, 4\]"):
        check_binary_labels(np.array([5, 4, 3, 2, 0, 2]))
