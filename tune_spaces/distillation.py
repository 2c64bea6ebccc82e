"""Search space of distillation: alpha, temperature, learning rate, batch (CERBERUS, appendix D)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from as2ray.losses.distillation import DistillationLoss

StudentT = TypeVar("StudentT", bound=Any)
"""A dataclass with fields `loss` and `training`: a training job, or a run of a recipe."""

ALPHA = (0.0, 0.1, 0.5, 0.9)
TEMPERATURE = (1.0, 3.0, 5.0)
GLOBAL_BATCH_SIZE = (8, 16, 24, 32, 64)
LEARNING_RATE = (1e-6, 1e-4)
"""From the paper's lowest rate to what small encoders need; sampled on a logarithmic scale."""


def suggest(trial: Any) -> None:
    """Suggests a value of each setting in an Optuna trial."""
    trial.suggest_categorical("alpha", ALPHA)
    trial.suggest_categorical("temperature", TEMPERATURE)
    trial.suggest_categorical("global_batch_size", GLOBAL_BATCH_SIZE)
    trial.suggest_float("learning_rate", *LEARNING_RATE, log=True)


def apply_params(params: Mapping[str, Any], student: StudentT) -> StudentT:
    """Returns a student's job or run with the settings of a trial.

    Args:
        params: Parameters of a trial, from `suggest`.
        student: The student; its loss is a distillation loss.
    """
    assert isinstance(student.loss, DistillationLoss)
    alpha, temperature = float(params["alpha"]), float(params["temperature"])
    batch_size, learning_rate = int(params["global_batch_size"]), float(params["learning_rate"])
    chosen: StudentT = replace(
        student,
        loss=replace(student.loss, alpha=alpha, temperature=temperature),
        training=replace(
            student.training,
            global_batch_size=batch_size,
            global_batch_tokens=None,
            learning_rate=learning_rate,
        ),
    )
    return chosen
