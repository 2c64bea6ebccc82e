import pytest
import torch

from as2ray.errors import ConfigError, TrainingError
from as2ray.losses import get_loss
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss

TARGETS = {
    "list": torch.tensor([7, 3, 3, 7, 3, 9, 9, 3]),
    "label": torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]),
    "row": torch.arange(8),
}
SCORES = torch.tensor([[0.2], [1.5], [-0.4], [0.9], [30.0], [-90.0], [-95.0], [0.5]])


def test_listwise_equals_the_mean_over_answers_of_each_list():
    expected = 0.0
    for mine in ([0, 3], [1, 2, 4, 7], [5, 6]):
        away = -SCORES[mine, 0].double().log_softmax(0)
        expected += float(away[TARGETS["label"][mine] > 0].mean())
    assert float(ListwiseLoss().loss(SCORES, TARGETS)) == pytest.approx(expected)
    two = torch.cat([torch.full((8, 1), 0.5), SCORES + 0.5], 1)
    assert float(ListwiseLoss().loss(two, TARGETS)) == pytest.approx(expected)


def test_gradient_is_softmax_less_labels_and_none_between_lists():
    logits = SCORES.clone().requires_grad_()
    ListwiseLoss().loss(logits, TARGETS).backward()
    for mine, answers in (([0, 3], 1), ([1, 2, 4, 7], 2), ([5, 6], 1)):
        expected = SCORES[mine, 0].softmax(0) - TARGETS["label"][mine] / answers
        torch.testing.assert_close(logits.grad[mine, 0], expected)


def test_list_of_two_is_the_logistic_loss_of_the_pair():
    targets = {name: values[[0, 3]] for name, values in TARGETS.items()}
    expected = torch.nn.functional.softplus(SCORES[0] - SCORES[3])
    torch.testing.assert_close(ListwiseLoss().loss(SCORES[[0, 3]], targets), expected[0])


def test_batch_that_keeps_workers_in_step_weighs_nothing():
    targets = {"list": torch.zeros(1), "label": torch.zeros(1), "row": torch.tensor([-1])}
    assert ListwiseLoss().loss(torch.ones(1, 2), targets) == 0


def test_batches_without_lists_or_several_outputs_are_refused():
    with pytest.raises(TrainingError, match="ListStream"):
        ListwiseLoss().loss(torch.zeros(8, 2), {"label": TARGETS["label"]})
    with pytest.raises(TrainingError, match=r"shape \[8, 2, 2\]"):
        ListwiseLoss().loss(torch.zeros(8, 2, 2), TARGETS)
    with pytest.raises(ConfigError, match="lists of 1 candidates"):
        ListwiseLoss(1)


def test_objectives_over_lists_say_how_long_those_are():
    assert get_loss("listwise") == ListwiseLoss(16)
    assert get_loss(ListwiseLoss(30)).candidates == 30
    assert MarginRankingLoss().list_size == 2
