import math

import pytest
import torch

from as2ray.errors import ConfigError
from as2ray.losses import get_loss
from as2ray.losses.base import StepContext
from as2ray.losses.pointwise import cross_entropy


def test_cross_entropy_of_two_logits_equals_the_hand_computation():
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]])
    label = torch.tensor([1.0, 0.0, 1.0])
    by_hand = -math.log(math.e / (1 + math.e)) - math.log(1 / (1 + math.exp(-3))) + math.log(2)
    assert cross_entropy(logits, {"label": label}).item() == pytest.approx(by_hand, abs=1e-6)


def test_cross_entropy_of_one_logit_equals_that_of_two_with_the_same_difference():
    two = torch.tensor([[0.3, 1.5], [2.0, -1.0], [-4.0, 3.0]])
    targets = {"label": torch.tensor([1.0, 0.0, 0.0])}
    one = two[:, 1:] - two[:, :1]
    torch.testing.assert_close(cross_entropy(one, targets), cross_entropy(two, targets))


@pytest.mark.parametrize("labels", [1, 2])
def test_cross_entropy_of_a_batch_is_the_sum_over_its_sequences(labels):
    logits = torch.randn(6, labels, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    parts = [cross_entropy(logits[i : i + 1], {"label": label[i : i + 1]}) for i in range(6)]
    torch.testing.assert_close(cross_entropy(logits, {"label": label}), sum(parts))


@pytest.mark.parametrize("labels", [1, 2])
def test_cross_entropy_of_bf16_logits_is_computed_in_fp32(labels):
    logits = torch.full((300, labels), 0.5, dtype=torch.bfloat16)
    loss = cross_entropy(logits, {"label": torch.ones(300)})
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy(logits.float(), {"label": torch.ones(300)}))


def test_loss_named_cross_entropy_asks_for_nothing_of_the_model():
    loss, context = get_loss("cross_entropy"), StepContext()
    logits, targets = torch.ones(3, 2), {"label": torch.tensor([1.0, 0.0, 0.0])}
    assert loss.forward_kwargs(context) == {}
    assert loss.compute(logits, targets, context) == cross_entropy(logits, targets)


def test_loss_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"'hinge'(.|\n)*cross_entropy"):
        get_loss("hinge")


@pytest.mark.parametrize("num_labels", [1, 2])
def test_cross_entropy_of_a_pair_counts_by_its_weight(num_labels):
    logits, label = torch.randn(3, num_labels), torch.tensor([0, 1, 1])
    each = [cross_entropy(logits[i : i + 1], {"label": label[i : i + 1]}) for i in range(3)]
    weight = torch.tensor([1.0, 0.0, 2.5])
    weighted = cross_entropy(logits, {"label": label, "weight": weight})
    torch.testing.assert_close(weighted, each[0] + 2.5 * each[2])
