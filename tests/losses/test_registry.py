import pickle
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter, ValidationError

from as2ray.losses import LOSSES, ConfigurableLoss, get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.losses.two_in_one import TwoInOneLoss

CONFIGURABLE = [
    DistillationLoss(0.1, 3.0, head_weights=(1.0, 2.0)),
    ListwiseLoss(30),
    MarginRankingLoss(0.5),
    TwoInOneLoss(consistency_loss=True),
]


@pytest.mark.parametrize("loss", CONFIGURABLE, ids=lambda loss: loss.type)
def test_type_selects_the_loss_that_a_recipe_describes(loss):
    assert TypeAdapter(ConfigurableLoss).validate_python(asdict(loss)) == loss
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert get_loss(loss) is loss


def test_error_in_a_loss_names_the_field_of_that_loss_alone():
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(ConfigurableLoss).validate_python({"type": "distillation", "alpha": 2})
    assert [error["loc"] for error in raised.value.errors()] == [("distillation", "alpha")]


def test_losses_with_settings_that_have_a_name_are_registered_under_their_type():
    for name, loss in LOSSES.items():
        assert getattr(loss, "type", name) == name
