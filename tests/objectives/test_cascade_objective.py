from collections import Counter

import pytest
import torch

from as2ray.errors import TrainingError
from as2ray.objectives import objective
from as2ray.objectives.base import Moment
from as2ray.objectives.cascade import early, every, in_turn, of_exits, uniform
from as2ray.objectives.pointwise import cross_entropy


def drawn(sampler, steps=4_000, begin=0, end=None) -> dict[int, float]:
    """How often each of four exits is drawn, as a part of all steps."""
    end = end or steps
    found = Counter(sampler(Moment(step, steps, 0, 4))[0] for step in range(begin, end))
    return {number: found[number] / (end - begin) for number in range(4)}


def test_uniform_draws_every_exit_as_often():
    assert drawn(uniform) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.03)


def test_uniform_draws_again_the_same_at_the_same_step_of_the_same_seed():
    moments = [Moment(step, 100, 7, 4) for step in range(50)]
    assert [uniform(m) for m in moments] == [uniform(m) for m in moments]
    assert [uniform(m) for m in moments] != [uniform(Moment(m.step, 100, 8, 4)) for m in moments]


def test_in_turn_goes_round():
    assert [in_turn(Moment(step, 9, 0, 3)) for step in range(4)] == [[0], [1], [2], [0]]


def test_early_prefers_low_exits_at_first_and_none_later():
    first = drawn(early, end=300)
    assert first[0] > 1.5 * first[2]
    assert first[1] > 1.5 * first[3]
    assert drawn(early, begin=2_000) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.03)


@pytest.mark.parametrize("name", ["uniform_exit", "exits_in_turn", "early_exit", "every_exit"])
def test_ranker_without_exits_is_refused(name):
    with pytest.raises(TrainingError, match="a ranker without exits"):
        objective(name).at(Moment(0, 1, 0, exits=0))


def test_loss_is_the_sum_over_the_exits_that_were_asked_for():
    logits = torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(0))
    targets = {"label": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])}
    by_hand = cross_entropy(logits[:, 0], targets) + cross_entropy(logits[:, 1], targets)
    task = objective("every_exit").at(Moment(exits=3))
    torch.testing.assert_close(task.loss(logits, targets), by_hand)
    assert list(task.asked["exits"]) == list(every(Moment(exits=3))) == [0, 1, 2]
    torch.testing.assert_close(
        of_exits(logits[:, :1], targets), cross_entropy(logits[:, 0], targets)
    )
