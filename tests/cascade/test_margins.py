import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.cascade.margins import Margins, RiskBound, _p_value, min_questions, select_step
from as2ray.cascade.pruning import Pruning, log_odds, margin_mask
from as2ray.errors import ConfigError, EvaluationError


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30),
    st.integers(1, 3),
    st.lists(st.sampled_from([0.0, 0.4, 1.0, np.inf]), min_size=4, max_size=4),
)
def test_rows_far_below_the_kth_best_of_their_question_are_dropped(rows, top_k, margins):
    question = np.array([q for q, _ in rows], np.int64)
    scores = np.array([s for _, s in rows], np.float32) / 10
    stays = margin_mask(question, scores, np.array(margins), top_k)
    for number in set(question.tolist()):
        values = log_odds(scores[question == number])
        best = sorted(values, reverse=True)[: max(1, min(top_k, len(values)))][-1]
        expected = [value >= best - margins[number] for value in values]
        assert stays[question == number].tolist() == expected


def test_scores_that_are_not_finite_are_not_lost():
    scores = np.array([0.9, np.nan, 0.1], np.float32)
    assert margin_mask(np.zeros(3, np.int64), scores, np.zeros(1), 1).tolist() == [
        True,
        True,
        False,
    ]


def test_log_odds_of_0_and_1_are_finite_and_beyond_all_others():
    values = log_odds(
        np.array([0.0, 1e-30, 0.5, np.nextafter(np.float32(1), np.float32(0)), 1.0], np.float32)
    )
    assert np.isfinite(values).all()
    assert values.tolist() == sorted(values)
    assert values[2] == 0


def test_pruning_drops_what_either_ranks_or_margins_drop():
    question, scores = np.zeros(4, np.int64), np.array([0.9, 0.8, 0.7, 0.01], np.float32)
    by_margin = Pruning(np.zeros((1, 1)), np.array([[2.0]]))
    assert by_margin.survivor_mask(0, question, scores).tolist() == [True, True, True, False]
    both = Pruning(np.array([[0.5]]), np.array([[2.0]]))
    assert both.survivor_mask(0, question, scores).tolist() == [True, True, False, False]
    assert not by_margin.drops_nothing
    assert Pruning.by_rank(np.zeros((1, 1))).drops_nothing


@pytest.mark.parametrize(
    ("max_loss", "confidence", "expected"),
    [
        (0.005, None, 199),
        (0.01, None, 99),
        (0.02, None, 49),
        (0.5, None, 1),
        (0.99, None, 1),
        (0.005, 0.9, 460),
        (0.02, 0.9, 114),
        (0.5, 0.75, 2),  # a whole number of questions
    ],
)
def test_bound_needs_so_many_questions(max_loss, confidence, expected):
    assert min_questions(max_loss, confidence) == expected
    assert select_step(np.zeros((3, expected)), max_loss, confidence) == 2
    if expected > 1:
        with pytest.raises(
            EvaluationError, match=rf"needs {expected} questions .* are {expected - 1}"
        ):
            select_step(np.zeros((3, expected - 1)), max_loss, confidence)


def test_step_is_the_last_whose_corrected_loss_is_within_the_bound():
    losses = np.zeros((4, 99))
    losses[1, 0], losses[2, 1], losses[3, :3] = 0.5, 0.5, 0.5
    # (0.5 + 1) / 100, (1 + 1) / 100 as the running maximum keeps the first loss, (1.5 + 1) / 100
    assert [select_step(losses, bound) for bound in (0.01, 0.015, 0.02, 0.025)] == [0, 1, 2, 3]
    losses[1, 0] = 0.51  # 1.51 / 100
    assert select_step(losses, 0.015) == 0


def test_step_beyond_a_loss_is_not_reached_though_its_own_loss_is_lower():
    losses = np.zeros((3, 99))
    losses[1] = 0.5
    assert select_step(losses, 0.02) == 0


@pytest.mark.parametrize("confidence", [None, 0.9])
def test_bound_holds_over_200_splits_of_stored_losses(confidence):
    """The mean loss on test is within the bound; with a confidence, in 9 of 10 splits."""
    random, max_loss = np.random.default_rng(0), 0.05
    steps = np.linspace(0, 0.3, 40)[:, None]
    # Losses of 400 questions along a path, of which harder ones lose early; not monotone.
    hardness = random.random(800)
    lost = random.random((40, 800)) < 4 * steps * hardness
    losses = np.where(lost, 1 - 1 / random.integers(2, 6, (40, 800)), 0.0)
    losses[0] = 0.0
    test_losses, chosen = [], []
    for _ in range(200):
        order = random.permutation(800)
        step = select_step(losses[:, order[:200]], max_loss, confidence)
        chosen.append(step)
        test_losses.append(np.maximum.accumulate(losses)[step, order[200:]].mean())
    mean, error = np.mean(test_losses), np.std(test_losses) / np.sqrt(200)
    assert mean <= max_loss + 3 * error
    assert np.mean(chosen) > 1  # the bound is not kept by dropping nothing
    if confidence is not None:
        assert np.mean(np.array(test_losses) > max_loss) <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 200)


@pytest.mark.parametrize("values", [(1.0,), (1.0, -0.1), (1.0, np.inf), (1.0, np.nan)])
def test_margins_that_do_not_fit_three_exits_are_refused(values):
    with pytest.raises(ConfigError, match="margins"):
        Margins(values).check_stages(3)
    with pytest.raises(ConfigError, match="top_k=0"):
        Margins((1.0, 0.5), 0).check_stages(3)


@pytest.mark.parametrize("mean_loss", [0.0, 0.01, 0.04, 0.2])
def test_p_value_is_the_smaller_of_hoeffding_s_and_bentkus_(mean_loss):
    # Learn then Test, section 3.1, with the tail of the binomial distribution summed.
    n, bound = 200, 0.05
    mean = min(mean_loss, bound)
    divergence = (1 - mean) * math.log((1 - mean) / (1 - bound))
    divergence += mean * math.log(mean / bound) if mean else 0.0
    lost = math.ceil(n * mean_loss - 1e-9)
    tail = sum(math.comb(n, k) * bound**k * (1 - bound) ** (n - k) for k in range(lost + 1))
    expected = min(math.exp(-n * divergence), math.e * tail)
    assert _p_value(mean_loss, n, bound) == pytest.approx(expected)


def test_bound_that_needs_more_questions_says_which_one_would_do():
    with pytest.raises(EvaluationError) as caught:
        select_step(np.zeros((2, 49)), 0.005)
    assert "a bound of 0.005 on the loss needs 199" in str(caught.value)
    assert "at least 0.0200" in str(caught.value)
    with pytest.raises(EvaluationError, match=r"at least 0\.0450"):
        select_step(np.zeros((2, 50)), 0.005, 0.9)


def test_margins_are_read_from_settings():
    settings = {"values": [1.0, 0.5], "top_k": 2, "bound": None}
    assert Margins.from_settings(settings) == Margins((1.0, 0.5), 2)
    bound = RiskBound("top_k", 0.02, 300, 0.01, 0.4, 0.9)
    margins = Margins.from_settings({**settings, "bound": asdict(bound)})
    assert margins.bound == bound
    margins.check_stages(3)
    Margins((0.0, 0.0)).check_stages(3)


def test_bound_in_words():
    bound = RiskBound("top_k", 0.02, 1300, 0.01, 0.4, 0.9)
    assert str(bound) == (
        "the probability of dropping one of the ranker's first candidates is at most 0.02 with 90% "
        "confidence; over 1,300 questions it was 0.0100, for 40.0% of the ranker's operations"
    )
    bound = RiskBound("first_place", 0.02, 300, 0.01, 0.4, last_exit_loss=0.05)
    assert str(bound).startswith("1 - 1 / (place of the last exit's first) is at most 0.02 in exp")
    assert str(bound).endswith("1 - 1 / (place of the ranker's first) was 0.0500")
    assert str(RiskBound("reciprocal_rank", 0.02, 3, 0, 0)).startswith("the loss of reciprocal")
