import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from as2ray.errors import TrainingError
from as2ray.losses import get_loss
from as2ray.losses.base import StepContext
from as2ray.losses.pairwise import MarginRankingLoss

CONTEXT = StepContext()
TARGETS = {
    "list": torch.tensor([7, 3, 3, 7, 9, 9]),
    "label": torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
    "row": torch.arange(6),
}


@pytest.mark.parametrize("margin", [1.0, 0.3])
def test_margin_equals_torch_s_over_the_pairs(margin):
    one = torch.tensor([[0.2], [1.5], [-0.4], [0.9], [3.0], [-1.0]])
    ours, others = one[[3, 1, 5], 0], one[[0, 2, 4], 0]
    expected = functional.margin_ranking_loss(
        ours, others, torch.ones(3), margin=margin, reduction="sum"
    )
    assert MarginRankingLoss(margin).compute(one, TARGETS, CONTEXT) == pytest.approx(
        float(expected)
    )
    other_logits = torch.tensor([[0.5], [-2.0], [4.0], [0.0], [1.0], [-3.0]])
    two = torch.cat([other_logits, one + other_logits], 1)
    assert MarginRankingLoss(margin).compute(two, TARGETS, CONTEXT) == pytest.approx(
        float(expected)
    )


def test_margin_that_is_kept_has_no_gradient():
    logits = torch.tensor([[0.0], [5.0], [0.0], [0.5], [0.0], [5.0]], requires_grad=True)
    MarginRankingLoss().compute(logits, TARGETS, CONTEXT).backward()
    assert logits.grad.ravel().tolist() == [1.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def test_batch_that_keeps_workers_in_step_weighs_nothing():
    targets = {"list": torch.zeros(1), "label": torch.zeros(1), "row": torch.tensor([-1])}
    assert MarginRankingLoss().compute(torch.ones(1, 1), targets, CONTEXT) == 0


def test_margin_of_unpaired_batches_or_several_outputs_is_refused():
    with pytest.raises(TrainingError, match="ListReader"):
        MarginRankingLoss().compute(torch.zeros(6, 2), {"label": TARGETS["label"]}, CONTEXT)
    with pytest.raises(TrainingError, match=r"shape \[6, 2, 2\]"):
        MarginRankingLoss().compute(torch.zeros(6, 2, 2), TARGETS, CONTEXT)
    with pytest.raises(ValidationError, match="margin"):
        MarginRankingLoss(margin=0)


def test_loss_with_settings_is_returned_as_it_is():
    assert get_loss("margin_ranking") == MarginRankingLoss()
    assert get_loss(MarginRankingLoss(0.5)) == MarginRankingLoss(0.5)
