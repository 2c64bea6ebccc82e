from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.cascade.pruning import (
    StagedScores,
    concatenate_scores,
    expand_drop_ratios,
    num_kept,
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


@pytest.mark.parametrize("drop", ["abc", [[0.1], [0.2, 0.3]], None])
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
