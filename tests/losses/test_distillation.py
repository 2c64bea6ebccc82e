import math

import pytest
import torch
from pydantic import ValidationError

from as2ray.errors import ConfigError, TrainingError
from as2ray.losses.base import StepContext
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.pointwise import cross_entropy
from as2ray.tables.schema import TEACHER_LOGITS


@pytest.fixture
def targets() -> dict[str, torch.Tensor]:
    """Labels of 5 sequences, and the logits of 3 teachers."""
    random = torch.Generator().manual_seed(0)
    label = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    return {"label": label, TEACHER_LOGITS: torch.randn(5, 6, generator=random) * 2}


@pytest.fixture
def heads() -> torch.Tensor:
    return torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1))


def loss(config: DistillationLoss, logits, targets, step=0) -> torch.Tensor:
    return config.compute(logits, targets, StepContext(step=step, total_steps=10))


def softmax(logits, tau):
    powers = [math.exp(x / tau) for x in logits]
    return [p / sum(powers) for p in powers]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("tau", [1.0, 3.0, 5.0])
def test_equation_1_equals_the_hand_computation(alpha, tau):
    student, teacher = [0.3, -1.2], [2.0, 1.0]
    p, q = softmax(teacher, tau), softmax(student, tau)
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q))
    hard = -math.log(softmax(student, 1.0)[1])
    by_hand = alpha * hard + (1 - alpha) * tau**2 * divergence
    targets = {"label": torch.tensor([1.0]), TEACHER_LOGITS: torch.tensor([teacher])}
    config = DistillationLoss(alpha=alpha, temperature=tau)
    assert loss(config, torch.tensor([student]), targets).item() == pytest.approx(by_hand, abs=1e-6)


def test_loss_is_the_sum_over_the_batch(heads, targets):
    config = DistillationLoss(alpha=0.3, temperature=3.0)
    parts = [
        loss(config, heads[i : i + 1], {name: x[i : i + 1] for name, x in targets.items()})
        for i in range(5)
    ]
    torch.testing.assert_close(loss(config, heads, targets), torch.stack(parts).sum())


def test_torchdistill_leaves_tau_squared_out_at_alpha_0_alone(heads, targets):
    for alpha, factor in ((0.0, 25.0), (0.5, 1.0)):
        ours = DistillationLoss(alpha=alpha, temperature=5.0)
        theirs = DistillationLoss(alpha=alpha, temperature=5.0, unscaled_soft_loss=True)
        torch.testing.assert_close(
            loss(ours, heads, targets), factor * loss(theirs, heads, targets)
        )


def test_each_head_learns_from_its_own_teacher_alone(heads, targets):
    heads.requires_grad_()
    loss(DistillationLoss(alpha=0.0), heads, targets).backward()
    before = heads.grad.clone()
    heads.grad = None
    changed = {**targets, TEACHER_LOGITS: targets[TEACHER_LOGITS].clone()}
    changed[TEACHER_LOGITS][:, 2:4] += torch.tensor([1.0, -1.0])
    loss(DistillationLoss(alpha=0.0), heads, changed).backward()
    moved = (heads.grad - before).abs().amax((0, 2))
    assert moved[1] > 1e-3
    assert moved[[0, 2]].max() == 0.0


def test_weights_are_the_heads_lambdas(heads, targets):
    parts = [
        loss(DistillationLoss(head_weights=tuple(float(i == j) for j in range(3))), heads, targets)
        for i in range(3)
    ]
    weighted = loss(DistillationLoss(head_weights=(0.5, 2.0, 1.0)), heads, targets)
    torch.testing.assert_close(weighted, 0.5 * parts[0] + 2.0 * parts[1] + parts[2])


def test_an_exit_before_the_heads_learns_from_all_teachers_alike(heads, targets):
    config = DistillationLoss(alpha=0.3, temperature=2.0)
    exits = torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(2))
    exit_losses = [
        loss(DistillationLoss(0.3, 2.0, teacher_index=teacher), exits, targets) / 3
        for teacher in range(3)
    ]
    context = StepContext(exit_layers=(1, 2, 3))
    assert list(config.forward_kwargs(context)["exit_indices"]) == [0, 1, 2]
    assert list(config.forward_kwargs(StepContext(exit_layers=(1, 2)))["exit_indices"]) == [0, 1]
    assert config.forward_kwargs(StepContext(exit_layers=(1,))) == {}
    total = config.compute(torch.cat([exits, heads], 1), targets, context)
    torch.testing.assert_close(total, loss(config, heads, targets) + sum(exit_losses))
    one = DistillationLoss(0.3, 2.0, teacher_index=1)
    total = one.compute(torch.cat([exits, heads], 1), targets, context)
    torch.testing.assert_close(total, loss(one, torch.cat([exits, heads], 1), targets))


def test_sum_in_turn_and_one_teacher_of_a_single_head(heads, targets):
    student = heads[:, 0]
    single = [loss(DistillationLoss(teacher_index=i), student, targets) for i in range(3)]
    round_robin = [
        loss(DistillationLoss(teacher_assignment="round_robin"), student, targets, step)
        for step in range(4)
    ]
    torch.testing.assert_close(
        loss(DistillationLoss(teacher_assignment="sum"), student, targets), sum(single)
    )
    for step, step_loss in enumerate(round_robin):
        torch.testing.assert_close(step_loss, single[step % 3])


def test_alpha_1_is_the_cross_entropy(heads, targets):
    total = loss(DistillationLoss(alpha=1.0, teacher_index=0), heads[:, 0], targets)
    torch.testing.assert_close(total, cross_entropy(heads[:, 0], targets))


def test_teachers_that_do_not_fit_are_refused(heads, targets):
    with pytest.raises(ConfigError, match="2 heads and 3 teachers"):
        loss(DistillationLoss(), heads[:, :2], targets)
    with pytest.raises(ConfigError, match="teacher_index 3 of 3"):
        loss(DistillationLoss(teacher_index=3), heads, targets)
    with pytest.raises(ConfigError, match="2 head_weights for 3 heads"):
        loss(DistillationLoss(head_weights=(1.0, 1.0)), heads, targets)
    with pytest.raises(TrainingError, match="teacher_logits"):
        loss(DistillationLoss(), heads, {"label": targets["label"]})
    targets[TEACHER_LOGITS][[1, 4], 2] = float("nan")
    with pytest.raises(TrainingError, match="2 of 5 sequences"):
        loss(DistillationLoss(), heads, targets)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 1.5},
        {"temperature": 0.0},
        {"teacher_assignment": "all"},
        {"teacher_index": -1},
        {"lesson": "sum"},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        DistillationLoss(**wrong)


def test_student_of_one_logit_learns_as_one_whose_other_is_0(heads, targets):
    one = heads[:, 0, 1:].clone().requires_grad_()
    for config in (DistillationLoss(0.3, 3.0, "sum"), DistillationLoss(0.0, 3.0, teacher_index=1)):
        total = loss(config, one, targets)
        torch.testing.assert_close(
            total, loss(config, torch.nn.functional.pad(one, (1, 0)), targets)
        )
        one.grad = None
        total.backward()
        assert one.grad.abs().min() > 1e-4


def test_parts_of_distillation_are_its_heads_and_its_hard_and_soft_losses(heads, targets):
    config = DistillationLoss(alpha=0.3, temperature=2.0, head_weights=(1.0, 0.5, 2.0))
    exits = torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(2))
    context = StepContext(exit_layers=(2, 4, 6))
    total = config.compute(torch.cat([exits, heads], 1), targets, context)
    parts = context.parts
    names = ["exit_2", "exit_4", "head_1", "head_2", "head_3"]
    assert parts.keys() == {*names, "hard", "soft"}
    torch.testing.assert_close(sum(parts[name] for name in names), total)
    torch.testing.assert_close(parts["hard"] + parts["soft"], total)
