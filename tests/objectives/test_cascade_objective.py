from collections import Counter

import numpy as np
import pytest
import torch

from as2ray.objectives.cascade import ExitLoss, early, every, in_turn, uniform
from as2ray.objectives.pointwise import cross_entropy


def drawn(sampler, steps=4_000, begin=0, end=None, exits=4) -> dict[int, float]:
    """How often each exit is drawn, as a part of all steps."""
    random, end = np.random.default_rng(0), end or steps
    found = Counter(sampler(random, step, steps, exits)[0] for step in range(begin, end))
    return {exit: found[exit] / (end - begin) for exit in range(exits)}


def test_uniform_draws_every_exit_as_often():
    assert drawn(uniform) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.03)


def test_in_turn_goes_round():
    assert [in_turn(None, step, 9, 3) for step in range(4)] == [[0], [1], [2], [0]]


def test_early_prefers_low_exits_at_first_and_none_later():
    first = drawn(early, end=100)
    assert first[0] > 1.5 * first[2] > first[3]
    assert drawn(early, begin=2_000) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.03)


def test_loss_is_the_sum_over_the_exits_that_were_asked_for():
    logits = torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(0))
    targets = {"label": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])}
    by_hand = cross_entropy(logits[:, 0], targets) + cross_entropy(logits[:, 1], targets)
    torch.testing.assert_close(ExitLoss(every)(logits, targets), by_hand)
    assert list(ExitLoss(every).exits(None, 0, 1, 3)) == [0, 1, 2]
