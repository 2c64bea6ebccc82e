import pickle
import sys
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from inspect import getsource

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from as2ray.errors import ConfigError
from as2ray.losses import LOSSES, ConfigurableLoss, get_loss, import_path, source_digest
from as2ray.losses.base import StepContext
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.losses.pointwise import CrossEntropyLoss
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


def test_own_loss_is_a_function_a_class_or_an_instance_named_by_its_module(tmp_path, monkeypatch):
    lines = ["from as2ray.losses.pointwise import CrossEntropyLoss, cross_entropy", ""]
    lines += ["def doubled(output, targets):", "    return 2 * cross_entropy(output, targets)", ""]
    lines += ["class Own(CrossEntropyLoss):", "    pass", "", "own = Own()", "number = 3"]
    (tmp_path / "losses_of_mine.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)  # console scripts do not search this folder themselves
    logits, targets = torch.tensor([[0.0, 1.0]]), {"label": torch.tensor([1])}

    def value(name):
        return float(get_loss(name).compute(logits, targets, StepContext()))

    cross_entropy = value("cross_entropy")
    assert value("losses_of_mine:doubled") == pytest.approx(2 * cross_entropy)
    assert value("losses_of_mine:Own") == value("losses_of_mine:own") == cross_entropy
    function = get_loss("losses_of_mine:doubled").function
    assert value(function) == pytest.approx(2 * cross_entropy)
    assert import_path(function) == "losses_of_mine:doubled"
    for wrong in ("losses_of_mine:number", "losses_of_mine:absent", "absent_module:loss", "a:"):
        with pytest.raises(ConfigError):
            get_loss(wrong)
    for nameless in (lambda output, targets: 0, partial(function)):
        with pytest.raises(ConfigError, match="no name"):
            import_path(nameless)


def test_own_loss_is_another_if_a_parameter_or_a_constant_of_its_modules_changes(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    helper, path = tmp_path / "scaled_loss.py", tmp_path / "chosen_losses.py"
    helper.write_text("FACTOR = 1\n\ndef scaled(output, targets):\n    return FACTOR\n")
    head = "from as2ray.losses import LOSSES\nfrom scaled_loss import scaled\n"
    path.write_text(head + "listwise = LOSSES['listwise_cross_entropy']\n")
    names = ["chosen_losses:scaled", "scaled_loss:scaled", "chosen_losses:listwise"]
    before = [source_digest(name) for name in names]
    assert before == [source_digest(name) for name in names]
    helper.write_text(helper.read_text().replace("= 1", "= 2"))
    constant = [source_digest(name) for name in names]
    path.write_text(path.read_text() + "# another parameter\n")
    parameter = [source_digest(name) for name in names]
    assert [a != b for a, b in zip(before, constant)] == [True, True, False]
    assert [a != b for a, b in zip(constant, parameter)] == [True, False, True]


def test_loss_of_as2ray_or_of_a_script_is_known_by_its_own_text(monkeypatch):
    def digest(value):
        return sha256(getsource(value).encode()).hexdigest()[:16]

    assert source_digest("as2ray.losses.pointwise:CrossEntropyLoss") == digest(CrossEntropyLoss)

    def loss(output, targets):
        return 0

    loss.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "loss", loss, raising=False)
    assert source_digest("__main__:loss") == digest(loss)
    with pytest.raises(ConfigError, match="source text is not known"):
        source_digest("builtins:sum")
