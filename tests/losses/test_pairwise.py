import pytest
import torch
from torch.nn import functional

from as2ray.errors import ConfigError, TrainingError
from as2ray.losses import get_loss
from as2ray.losses.pairwise import MarginRankingLoss

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
    assert MarginRankingLoss(margin).loss(one, TARGETS) == pytest.approx(float(expected))
    two = torch.cat([torch.full((6, 1), 0.5), one + 0.5], 1)
    assert MarginRankingLoss(margin).loss(two, TARGETS) == pytest.approx(float(expected))


def test_margin_that_is_kept_has_no_gradient():
    logits = torch.tensor([[0.0], [5.0], [0.0], [0.5], [0.0], [5.0]], requires_grad=True)
    MarginRankingLoss().loss(logits, TARGETS).backward()
    assert logits.grad.ravel().tolist() == [1.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def test_batch_that_keeps_workers_in_step_weighs_nothing():
    targets = {"list": torch.zeros(1), "label": torch.zeros(1), "row": torch.tensor([-1])}
    assert MarginRankingLoss().loss(torch.ones(1, 2), targets) == 0


def test_margin_of_unpaired_batches_or_several_outputs_is_refused():
    with pytest.raises(TrainingError, match="ListStream"):
        MarginRankingLoss().loss(torch.zeros(6, 2), {"label": TARGETS["label"]})
    with pytest.raises(TrainingError, match=r"shape \[6, 2, 2\]"):
        MarginRankingLoss().loss(torch.zeros(6, 2, 2), TARGETS)
    with pytest.raises(ConfigError, match="margin 0"):
        MarginRankingLoss(0)


def test_objective_with_settings_is_its_own():
    assert get_loss("margin") == MarginRankingLoss()
    assert get_loss(MarginRankingLoss(0.5)) == MarginRankingLoss(0.5)
