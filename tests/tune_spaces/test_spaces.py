import optuna
import pytest

from as2ray.errors import ConfigError
from as2ray.losses.distillation import DistillationLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from tune_spaces import bm25, distillation, drop_ratios, ensembles
from tune_spaces.run_fields import Interval, RunFields


def asked(space, answers) -> dict:
    """What a space asks of a trial that is answered so."""
    trial = optuna.trial.FixedTrial(answers)
    space(trial)
    return trial.params


def test_grid_is_the_paper_s_1296_choices():
    points = list(drop_ratios.param_grid(5))
    assert len(points) == len(set(points)) == 1_296
    assert {ratio for point in points for ratio in point} == {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}


def test_exit_that_is_not_used_is_not_asked_for_a_ratio():
    answers = {"use_0": True, "drop_0": 0.4, "use_1": False, "drop_1": 0.9}
    found = asked(lambda trial: drop_ratios.suggest(trial, 3), answers)
    assert set(found) == {"use_0", "drop_0", "use_1"}
    assert drop_ratios.apply_params(found, 3) == ([0, 2], [0.4])
    none = asked(lambda trial: drop_ratios.suggest(trial, 3), {"use_0": False, "use_1": False})
    assert drop_ratios.apply_params(none, 3) == ([2], [])


def test_weights_sum_to_one_and_are_equal_where_all_are_zero():
    found = asked(
        lambda trial: ensembles.suggest(trial, 3),
        {"weight_0": 0.2, "weight_1": 0.0, "weight_2": 0.6},
    )
    assert ensembles.apply_params(found, 3) == pytest.approx((0.25, 0.0, 0.75))
    zero = {f"weight_{i}": 0.0 for i in range(4)}
    assert ensembles.apply_params(zero, 4) == (0.25,) * 4


def test_distillation_s_answers_take_the_place_of_a_student_s_settings():
    answers = {"alpha": 0.1, "temperature": 5.0, "global_batch_size": 24, "learning_rate": 3e-5}
    found = asked(distillation.suggest, answers)
    job = TrainingJob(
        ModelSpec("encoder"),
        ("train",),
        {"dev": "dev"},
        TrainingConfig(epochs=7),
        DistillationLoss(teacher_assignment="sum", alpha=0.9),
    )
    chosen = distillation.apply_params(found, job)
    assert chosen.loss == DistillationLoss(teacher_assignment="sum", alpha=0.1, temperature=5.0)
    assert chosen.training == TrainingConfig(epochs=7, global_batch_size=24, learning_rate=3e-5)
    assert chosen.model == job.model


def test_grid_of_bm25_is_the_paper_s_56_points():
    points = bm25.param_grid()
    assert len(points) == len(set(points)) == 56
    assert (min(points), max(points)) == ((0.4, 0.3), (1.6, 1.0))


def test_fields_of_a_run_are_sampled_from_their_values_and_intervals():
    space = RunFields(
        {
            "training.epochs": Interval(1, 5),
            "training.learning_rate": Interval(1e-6, 1e-2, log=True),
            "training.global_batch_size": [8, 64],
            "loss": ["cross_entropy", "listwise_cross_entropy"],
        }
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    job = TrainingJob(ModelSpec("encoder"), ("train",), {}, TrainingConfig())
    runs = []
    for _ in range(200):
        trial = study.ask()
        space.suggest(trial)
        runs.append(space.apply_params(trial.params, job))
    trainings = [run.training for run in runs]
    assert {t.epochs for t in trainings} == {1, 2, 3, 4, 5}
    assert {t.global_batch_size for t in trainings} == {8, 64}
    assert {run.loss for run in runs} == {"cross_entropy", "listwise_cross_entropy"}
    below = sum(t.learning_rate < 1e-4 for t in trainings)
    assert 70 < below < 130  # the middle of the logarithms
    assert {run.model for run in runs} == {job.model}


@pytest.mark.parametrize("interval", [(2, 1), (1, 1), (0, 1, True)])
def test_interval_without_numbers_is_refused(interval):
    with pytest.raises(ConfigError, match="low < high"):
        Interval(*interval)
