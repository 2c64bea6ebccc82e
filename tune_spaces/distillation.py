"""What distillation is told: alpha, temperature, learning rate and batch (CERBERUS, appendix D).

Knows Optuna's trials and what a run is told. Must not know how a trial trains.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from as2ray.losses.distillation import DistillationLoss

StudentT = TypeVar("Told", bound=Any)
"""What has an `objective` and a `training`: a job, or a step of a recipe."""

ALPHA = (0.0, 0.1, 0.5, 0.9)
TEMPERATURE = (1.0, 3.0, 5.0)
GLOBAL_BATCH_SIZE = (8, 16, 24, 32, 64)
LEARNING_RATE = (1e-6, 1e-4)
"""From the paper's lowest rate to what small encoders want; drawn evenly over its logarithm."""


def suggest(trial: Any) -> None:
    """Asks a trial of Optuna for each setting."""
    trial.suggest_categorical("alpha", ALPHA)
    trial.suggest_categorical("temperature", TEMPERATURE)
    trial.suggest_categorical("batch", GLOBAL_BATCH_SIZE)
    trial.suggest_float("learning_rate", *LEARNING_RATE, log=True)


def apply_params(params: Mapping[str, Any], student: StudentT) -> StudentT:
    """A student's job or step with a trial's answers in place of its settings.

    Args:
        config: What `suggest` was answered.
        student: Its objective is a distillation.
    """
    assert isinstance(student.objective, DistillationLoss)
    alpha, temperature = float(params["alpha"]), float(params["temperature"])
    batch, rate = int(params["batch"]), float(params["learning_rate"])
    chosen: StudentT = replace(
        student,
        objective=replace(student.objective, alpha=alpha, temperature=temperature),
        training=replace(student.training, batch=batch, batch_tokens=None, learning_rate=rate),
    )
    return chosen
