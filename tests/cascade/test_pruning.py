from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.cascade.pruning import (
    Pruning,
    StagedScores,
    concatenate_prunings,
    concatenate_scores,
    expand_drop_ratios,
    log_odds,
    lower_scores,
    num_kept,
    prune,
    survivor_mask,
)
from as2ray.errors import ConfigError


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [("nearest", [128, 90, 63, 44, 31]), ("floor", [128, 90, 63, 45, 32])],
)
def test_kept_follows_the_paper_s_example_or_its_text(rounding, expected):
    sizes = [128]
    for _ in range(4):
        sizes.append(int(num_kept(sizes[-1], 0.3, rounding)))
    assert sizes == expected


def test_floor_of_a_product_that_is_whole_but_for_its_last_digit_is_that_number():
    assert num_kept(100, 0.29) == 71
    assert num_kept(10, 0.3) == 7


def test_kept_is_never_none_of_some_nor_some_of_none():
    assert num_kept(np.array([0, 1, 2, 3]), 0.99).tolist() == [0, 1, 1, 1]


@given(st.integers(1, 1_000), st.integers(0, 99))
def test_kept_is_what_is_left_by_the_rounded_part(size, hundredths):
    dropped = Fraction(hundredths, 100) * size
    assert num_kept(size, hundredths / 100) == max(1, size - floor(dropped))
    nearest = int(num_kept(size, hundredths / 100, "nearest"))
    assert abs(nearest - max(1, size - round(dropped))) <= (hundredths * size % 100 == 50)
    assert num_kept(size, 0.0) == size


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5))), st.floats(0, 0.99))
def test_survivors_are_the_highest_of_each_question(rows, drop):
    question = np.array([q for q, _ in rows], np.int64)
    score = np.array([s for _, s in rows], np.float32)
    stays = survivor_mask(question, score, np.full(4, drop))
    for number in set(question.tolist()):
        own = np.flatnonzero(question == number)
        best = sorted(own, key=lambda i: -score[i])[: int(num_kept(len(own), drop))]
        assert set(np.flatnonzero(stays & (question == number))) == set(best)


def test_rank_by_puts_a_later_stage_above_any_score_and_keeps_close_scores_apart():
    close = np.nextafter(np.float32(0.9), np.float32(1))
    scored = StagedScores(np.array([0.99, 0.9, close], np.float32), np.array([0, 11, 11]))
    assert np.argsort(-scored.sort_keys).tolist() == [2, 1, 0]


def test_rank_by_puts_a_survivor_of_score_0_above_a_dropped_of_score_1():
    scored = StagedScores(np.array([1.0, 0.0, 1.0, 1e-20], np.float32), np.array([0, 1, 1, 2]))
    assert np.argsort(-scored.sort_keys, kind="stable").tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("drop", ["abc", "0.5", ["0.3", 0.2], False, [[0.1], [0.2, 0.3]], None])
def test_drop_ratios_that_are_no_numbers_are_refused(drop):
    with pytest.raises(ConfigError, match="drop ratios"):
        expand_drop_ratios(drop, 3)


def test_scores_of_groups_are_joined_by_row():
    first = StagedScores(np.array([0.1, 0.2]), logits=np.array([-1.0, -2.0]))
    second = StagedScores(np.array([0.3]), logits=np.array([3.0]))
    joined = concatenate_scores([first, second], np.array([2, 0, 1]))
    assert joined.scores.tolist() == [0.2, 0.3, 0.1]
    assert joined.logits.tolist() == [-2.0, 3.0, -1.0]
    assert joined.stage_index is None


def test_drop_ratios_are_of_stages_or_of_questions_and_stages():
    assert expand_drop_ratios(0.3, 3).tolist() == [0.3, 0.3]
    assert expand_drop_ratios([0.3, 0.4], 3).tolist() == [0.3, 0.4]
    assert expand_drop_ratios(0.3, 3, 2).tolist() == [[0.3, 0.3]] * 2
    assert expand_drop_ratios([0.3, 0.4], 3, 2).tolist() == [[0.3, 0.4]] * 2
    of_questions = [[0.1, 0.2], [0.3, 0.4]]
    assert expand_drop_ratios(of_questions, 3, 2).tolist() == of_questions
    expand_drop_ratios(0.3, 3, 2)[0, 0] = 0.5  # an array of its own
    given_ratios = np.array([0.3, 0.4])
    expand_drop_ratios(given_ratios, 3)[0] = 0.5
    assert given_ratios.tolist() == [0.3, 0.4]
    for wrong in ([0.3], [[0.3, 0.4]], [[0.3, 0.4]] * 3):
        with pytest.raises(ConfigError, match="for 3 stages; give one number, or 2"):
            expand_drop_ratios(wrong, 3, 2)
    assert expand_drop_ratios([0.0, 0.99], 3).tolist() == [0.0, 0.99]
    for wrong in ([-0.1, 0.5], [1.0, 0.5], [np.nan, 0.5]):
        with pytest.raises(ConfigError, match="at least 0 and below 1"):
            expand_drop_ratios(wrong, 3)
    with pytest.raises(ConfigError, match=r"drop ratios 1.5 must be at least 0 and below 1"):
        expand_drop_ratios(1.5, 1)  # not even if there is no stage to drop after


class Scorer:
    """Scores that each stage knows, by row."""

    question_index = np.array([0, 0, 0, 1, 1])

    def __init__(self):
        self.scored = []

    def score(self, stage_index, rows):
        self.scored.append(rows.tolist())
        stages = [[0.1, 0.9, 0.5, 0.2, 0.8], [0, 0.3, 0.6, 0, 0.7], [0, 0, 0.4, 0, 0.5]]
        return np.array(stages[stage_index], np.float32)[rows]


def test_each_stage_scores_what_the_last_one_kept():
    scorer = Scorer()
    pruning = Pruning.by_rank(np.array([[0.4, 0.5], [0.5, 0.0]]))
    scores, stage_index = prune(scorer, pruning)
    assert scorer.scored == [[0, 1, 2, 3, 4], [1, 2, 4], [2, 4]]
    np.testing.assert_allclose(scores, [0.1, 0.3, 0.4, 0.2, 0.5], rtol=1e-6)
    assert scores.dtype == np.float32
    assert stage_index.tolist() == [0, 1, 2, 0, 2]
    assert stage_index.dtype == np.int64


def test_prunings_of_groups_of_questions_are_joined_and_selected():
    first = Pruning(np.array([[0.1]]), np.array([[1.0]]), 2, "nearest")
    second = Pruning(np.array([[0.2], [0.3]]), np.array([[2.0], [3.0]]), 2, "nearest")
    joined = concatenate_prunings([first, second])
    assert joined.drop_ratios.tolist() == [[0.1], [0.2], [0.3]]
    assert joined.margins.tolist() == [[1.0], [2.0], [3.0]]
    assert (joined.top_k, joined.rounding) == (2, "nearest")
    # Requests may bring drop ratios instead; they leave the margins of others as they are.
    by_rank = Pruning.by_rank(np.array([[0.1]]), "nearest")
    for prunings in ([by_rank, first], [first, by_rank]):
        assert concatenate_prunings(prunings).top_k == 2
    assert concatenate_prunings([first]) == first
    selected = joined.select(np.array([2, 0]))
    assert selected.drop_ratios.tolist() == [[0.3], [0.1]]
    assert selected.margins.tolist() == [[3.0], [1.0]]
    assert selected.top_k == 2


def test_rounding_of_a_pruning_is_that_of_its_ratios():
    question, scores = np.zeros(5, np.int64), np.arange(5, dtype=np.float32)
    for rounding, kept in (("floor", 4), ("nearest", 3)):
        pruning = Pruning.by_rank(np.array([[0.35]]), rounding)
        assert pruning.survivor_mask(0, question, scores).sum() == kept
        assert survivor_mask(question, scores, np.array([0.35]), rounding).sum() == kept
    assert survivor_mask(question, scores, np.array([0.35])).sum() == 4
    default = Pruning.by_rank(np.array([[0.35]]))
    assert default.survivor_mask(0, question, scores).sum() == 4


def test_stages_are_joined_by_row():
    parts = [StagedScores(np.zeros(2), np.array([0, 1])), StagedScores(np.zeros(1), np.array([2]))]
    assert concatenate_scores(parts, np.array([2, 0, 1])).stage_index.tolist() == [1, 2, 0]
    assert StagedScores(np.array([0.9, 0.2])).sort_keys.tolist() == [0.9, 0.2]
    with_logits = StagedScores(np.ones(2, np.float32), logits=np.array([9.0, 8.0]))
    assert with_logits.sort_keys.tolist() == [9.0, 8.0]


def test_scores_are_lowered_in_log_odds():
    scores = np.array([0.0, 1e-6, 0.5, 0.9, 1.0], np.float32)
    lowered = lower_scores(scores, np.array([1.0, 2.0, 0.0, 3.0, 0.5]))
    assert lowered.dtype == np.float32
    assert lowered[2] == np.float32(0.5)
    expected = log_odds(scores[[1, 3]]) - [2.0, 3.0]
    np.testing.assert_allclose(log_odds(lowered[[1, 3]]), expected, atol=1e-5)
    assert 0 <= lowered[0] <= scores[0] + 1e-30
    assert lowered[3] < lowered[4] < 1
