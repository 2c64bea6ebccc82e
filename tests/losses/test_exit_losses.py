from collections import Counter

import numpy as np
import pytest
import torch

from as2ray.errors import TrainingError
from as2ray.losses import LOSSES, get_loss
from as2ray.losses.base import StepContext
from as2ray.losses.exits import (
    ExitLoss,
    all_exits,
    round_robin,
    sample_early_biased,
    sample_uniform,
)
from as2ray.losses.pointwise import cross_entropy

FOUR = (1, 2, 3, 4)


def drawn(sampler, steps=4_000, begin=0, end=None) -> dict[int, float]:
    """How often each of four exits is drawn, as a part of all steps."""
    end = end or steps
    counts = Counter(sampler(StepContext(step, steps, 0, FOUR))[0] for step in range(begin, end))
    return {number: counts[number] / (end - begin) for number in range(4)}


def test_uniform_draws_every_exit_as_often():
    assert drawn(sample_uniform) == pytest.approx(dict.fromkeys(range(4), 0.25), abs=0.03)


def test_uniform_draws_again_the_same_at_the_same_step_of_the_same_seed():
    contexts = [StepContext(step, 100, 7, FOUR) for step in range(50)]
    assert [sample_uniform(m) for m in contexts] == [sample_uniform(m) for m in contexts]
    assert [sample_uniform(m) for m in contexts] != [
        sample_uniform(StepContext(m.step, 100, 8, FOUR)) for m in contexts
    ]


def test_in_turn_goes_round():
    contexts = [StepContext(step, 9, 0, (1, 2, 3)) for step in range(4)]
    assert [round_robin(context) for context in contexts] == [[0], [1], [2], [0]]


def test_early_prefers_low_exits_at_first_and_none_later():
    first = drawn(sample_early_biased, end=300)
    assert first[0] > 1.5 * first[2]
    assert first[1] > 1.5 * first[3]
    # After three eighths of the run the bias is a quarter.
    middle = drawn(sample_early_biased, steps=40_000, begin=13_000, end=17_000)
    weights = np.arange(4, 0, -1.0) ** 0.25
    assert [*middle.values()] == pytest.approx(weights / weights.sum(), abs=0.025)
    assert drawn(sample_early_biased, begin=2_000) == pytest.approx(
        dict.fromkeys(range(4), 0.25), abs=0.03
    )


@pytest.mark.parametrize(
    "name", [name for name, loss in LOSSES.items() if isinstance(loss, ExitLoss)]
)
def test_ranker_without_exits_is_refused(name):
    with pytest.raises(TrainingError, match="the ranker has no exits"):
        get_loss(name).forward_kwargs(StepContext())


def test_loss_is_the_sum_over_the_exits_that_were_asked_for():
    logits = torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(0))
    targets = {"label": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])}
    by_hand = cross_entropy(logits[:, 0], targets) + cross_entropy(logits[:, 1], targets)
    loss, context = get_loss("all_exits"), StepContext(exit_layers=(1, 2, 3))
    torch.testing.assert_close(loss.compute(logits, targets, context), by_hand)
    exit_indices = loss.forward_kwargs(context)["exit_indices"]
    assert list(exit_indices) == list(all_exits(context)) == [0, 1, 2]
    losses = [cross_entropy(logits[:, index], targets) for index in (0, 1)]
    context = StepContext(step=1, exit_layers=(2, 4, 6))
    loss = get_loss("round_robin_exit").compute(logits[:, :1], targets, context)
    torch.testing.assert_close(loss, losses[0])
    assert context.parts == {"exit_4": loss}


def test_gradient_is_stopped_by_the_loss_that_is_named_so_alone():
    context = StepContext(exit_layers=FOUR)
    kwargs = get_loss("uniform_exit").forward_kwargs(context)
    stopped = get_loss("uniform_exit_stop_gradient").forward_kwargs(context)
    assert stopped == {**kwargs, "stop_gradient": True}
    assert kwargs == {"exit_indices": sample_uniform(context)}


def test_parts_of_a_cascade_with_heads_are_named_by_layer_and_head():
    logits = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0))
    targets = {"label": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])}
    context = StepContext(exit_layers=(2, 4))
    loss = get_loss("all_exits").compute(logits, targets, context)
    assert list(context.parts) == ["exit_2", "head_1", "head_2", "head_3"]
    torch.testing.assert_close(sum(context.parts.values()), loss)
