import pytest
import torch
from torch import nn

from as2ray.errors import ConfigError
from as2ray.training.config import TrainingConfig
from as2ray.training.optimization import compute_learning_rate, create_optimizer


@pytest.mark.parametrize(
    ("lr_scheduler_type", "warmup_ratio", "expected"),
    [
        ("linear", 0.2, {0: 0, 0.1: 0.5, 0.2: 1, 0.6: 0.5, 1: 0}),
        ("linear", 0.0, {0: 1, 0.25: 0.75, 1: 0}),
        ("constant", 0.2, {0: 0, 0.1: 0.5, 0.2: 1, 0.6: 1, 1: 1}),
        ("constant", 0.0, {0: 1, 1: 1}),
        ("triangular", 0.5, {0: 0, 0.25: 0.5, 0.5: 1, 0.75: 0.5, 1: 0}),
        ("triangular", 0.25, {0.125: 0.5, 0.25: 1, 0.5: 0, 0.75: 1, 1: 0}),
    ],
)
def test_rate_at_known_points_of_a_run_is_as_drawn(lr_scheduler_type, warmup_ratio, expected):
    training = TrainingConfig(
        lr_scheduler_type=lr_scheduler_type, warmup_ratio=warmup_ratio, learning_rate=4e-5
    )
    got = {progress: compute_learning_rate(training, progress, 100) / 4e-5 for progress in expected}
    assert got == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("lr_scheduler_type", ["linear", "constant", "triangular"])
def test_warmup_in_steps_does_not_depend_on_the_length_of_the_run(lr_scheduler_type):
    """4,000 updates of ramp in the Cascade Transformer, whose WikiQA run may be shorter."""
    config = TrainingConfig(
        lr_scheduler_type=lr_scheduler_type, warmup_steps=4_000, learning_rate=1e-6
    )
    for num_steps in (1_000, 20_000):
        rate = compute_learning_rate(config, 500 / num_steps, num_steps)
        assert rate == pytest.approx(1e-6 / 8)
    peak = compute_learning_rate(config, 4_000 / 20_000, 20_000)
    assert peak == pytest.approx(1e-6)


def test_linear_rate_is_a_single_triangle_and_triangular_repeats_it():
    peaks = {}
    for kind in ("linear", "triangular"):
        config = TrainingConfig(lr_scheduler_type=kind, warmup_steps=10)
        rates = [compute_learning_rate(config, step / 100, 100) for step in range(101)]
        peaks[kind] = [step for step in range(101) if rates[step] > 0.99 * max(rates)]
    assert peaks == {"linear": [10], "triangular": [10, 30, 50, 70, 90]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("max_steps", 0),
        ("warmup_steps", -1),
        ("global_batch_size", 0),
        ("global_batch_tokens", 0),
        ("max_batch_tokens", 0),
        ("learning_rate", 0.0),
        ("learning_rate", -1e-5),
        ("learning_rate", float("nan")),
        ("head_learning_rate", 0.0),
        ("restart_every", "step"),
        ("weight_decay", -0.1),
        ("lr_scheduler_type", "cosine"),
        ("precision", "int8"),
        ("warmup_ratio", 1.0),
        ("warmup_ratio", -0.1),
        ("max_grad_norm", -1.0),
        ("eval_steps", 0),
        ("early_stopping_patience", 0),
        ("seed", -1),
    ],
)
def test_training_setting_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        TrainingConfig(**{name: value})


def test_training_triangular_without_warmup_is_refused():
    with pytest.raises(ConfigError, match="triangular"):
        TrainingConfig(lr_scheduler_type="triangular", warmup_ratio=0.0)


def test_optimiser_decays_matrices_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(5, 3))
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        for weights in model.parameters():
            weights.fill_(1.0)
    made = create_optimizer(model, TrainingConfig(learning_rate=0.1, weight_decay=0.5))
    for weights in model.parameters():
        weights.grad = torch.zeros_like(weights)
    made.step()
    changed = {n for n, p in model.named_parameters() if not torch.all(p == 1.0)}
    assert changed == {"2.weight"}
    torch.testing.assert_close(model[2].weight, torch.full((5, 3), 0.95))


def test_optimiser_gives_the_head_a_rate_of_its_own():
    network = nn.ModuleDict({"body": nn.Linear(2, 2), "classifier": nn.Linear(2, 2)})
    model = nn.ModuleDict({"network": network})
    training = TrainingConfig(learning_rate=0.1, head_learning_rate=0.5, weight_decay=0.3)
    groups = create_optimizer(model, training, "body").param_groups
    told = {
        id(weights): (group["lr"], group["weight_decay"])
        for group in groups
        for weights in group["params"]
    }
    body, head = network["body"], network["classifier"]
    assert told == {
        id(body.weight): (0.1, 0.3),
        id(body.bias): (0.1, 0.0),
        id(head.weight): (0.5, 0.3),
        id(head.bias): (0.5, 0.0),
    }
    assert len(create_optimizer(model, TrainingConfig(), "body").param_groups) == 2
