import pytest
import torch
from pydantic import ValidationError

from as2ray.errors import TrainingError
from as2ray.losses import get_loss
from as2ray.losses.base import StepContext
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss

TARGETS = {
    "list": torch.tensor([7, 3, 3, 7, 3, 9, 9, 3]),
    "label": torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]),
    "row": torch.arange(8),
}
CONTEXT = StepContext()
SCORES = torch.tensor([[0.2], [1.5], [-0.4], [0.9], [30.0], [-90.0], [-95.0], [0.5]])


def test_listwise_equals_the_mean_over_answers_of_each_list():
    expected = 0.0
    for mine in ([0, 3], [1, 2, 4, 7], [5, 6]):
        away = -SCORES[mine, 0].double().log_softmax(0)
        expected += float(away[TARGETS["label"][mine] > 0].mean())
    assert float(ListwiseLoss().compute(SCORES, TARGETS, CONTEXT)) == pytest.approx(expected)
    two = torch.cat([torch.full((8, 1), 0.5), SCORES + 0.5], 1)
    assert float(ListwiseLoss().compute(two, TARGETS, CONTEXT)) == pytest.approx(expected)


def test_gradient_is_softmax_less_labels_and_none_between_lists():
    logits = SCORES.clone().requires_grad_()
    ListwiseLoss().compute(logits, TARGETS, CONTEXT).backward()
    for mine, answers in (([0, 3], 1), ([1, 2, 4, 7], 2), ([5, 6], 1)):
        expected = SCORES[mine, 0].softmax(0) - TARGETS["label"][mine] / answers
        torch.testing.assert_close(logits.grad[mine, 0], expected)


def test_list_of_two_is_the_logistic_loss_of_the_pair():
    targets = {name: values[[0, 3]] for name, values in TARGETS.items()}
    expected = torch.nn.functional.softplus(SCORES[0] - SCORES[3])
    torch.testing.assert_close(
        ListwiseLoss().compute(SCORES[[0, 3]], targets, CONTEXT), expected[0]
    )


def test_batch_that_keeps_workers_in_step_weighs_nothing():
    targets = {"list": torch.zeros(1), "label": torch.zeros(1), "row": torch.tensor([-1])}
    assert ListwiseLoss().compute(torch.tensor([[1.0, 3.0]]), targets, CONTEXT) == 0


def test_batches_without_lists_or_several_outputs_are_refused():
    with pytest.raises(TrainingError, match="ListReader"):
        ListwiseLoss().compute(torch.zeros(8, 2), {"label": TARGETS["label"]}, CONTEXT)
    with pytest.raises(TrainingError, match=r"shape \[8, 2, 2\]"):
        ListwiseLoss().compute(torch.zeros(8, 2, 2), TARGETS, CONTEXT)
    with pytest.raises(ValidationError, match="list_size"):
        ListwiseLoss(list_size=1)


def test_losses_over_lists_have_a_list_size():
    assert get_loss("listwise_cross_entropy") == ListwiseLoss(16)
    assert get_loss(ListwiseLoss(30)).list_size == 30
    assert MarginRankingLoss().list_size == 2
