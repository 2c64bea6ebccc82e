"""Search space of any fields of a training run, as a recipe lists them."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic.dataclasses import dataclass

from as2ray.errors import ConfigError, from_validation_error

RunT = TypeVar("RunT")
"""A dataclass with the fields of a run: a training job, its stage, or a run of a recipe."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Interval:
    """Numbers from `low` to `high`, both included: integers if both are."""

    low: int | float
    high: int | float
    log: bool = False
    """Samples on a logarithmic scale."""

    def __post_init__(self) -> None:
        if not -inf < self.low < self.high < inf or (self.log and self.low <= 0):
            lowest = "0 < low < high" if self.log else "low < high"
            raise ConfigError(f"an interval needs {lowest}, not {self.low} and {self.high}")


def _kind(values: Any) -> str | None:
    """Tag of the union below; None of what is neither an interval nor a list of scalars."""
    if isinstance(values, list):
        return (
            "list" if all(isinstance(value, bool | int | float | str) for value in values) else None
        )
    return "interval" if isinstance(values, Mapping | Interval) else None


Values = Annotated[
    Annotated[Interval, Tag("interval")]
    | Annotated[list[bool | int | float | str], Field(min_length=1), Tag("list")],
    Discriminator(
        _kind,
        custom_error_type="space_values",
        custom_error_message="a field has a list of numbers or texts, or an interval such as "
        "{low: 1, high: 3}",
    ),
]
"""What a field can be: an interval, or one of several values."""


def list_endpoints(values: Values) -> list[Any]:
    """Returns the values, or the ends of an interval."""
    return values if isinstance(values, list) else [values.low, values.high]


@dataclass(frozen=True)
class RunFields:
    """A search space of fields of a run."""

    values: dict[str, Values]
    """Values by the dotted name of the field, such as `training.learning_rate`."""

    def suggest(self, trial: Any) -> None:
        """Suggests a value of each field in an Optuna trial."""
        for name, values in self.values.items():
            if isinstance(values, list):
                trial.suggest_categorical(name, values)
            elif isinstance(values.low, int) and isinstance(values.high, int):
                trial.suggest_int(name, values.low, values.high, log=values.log)
            else:
                trial.suggest_float(name, values.low, values.high, log=values.log)

    def apply_params(self, params: Mapping[str, Any], student: RunT) -> RunT:
        """Returns a run with the values of a trial."""
        return apply_values(params, student)


def apply_values(values: Mapping[str, Any], run: RunT) -> RunT:
    """Returns a run with other values of fields.

    Args:
        values: By the dotted name of the field.
        run: A run of a recipe, its stage or its training job.

    Raises:
        ConfigError: There is no such field, or it does not accept the value.
    """
    for name, value in values.items():
        parent, _, leaf = name.rpartition(".")
        problem = f"the run's field {name!r} cannot be {value!r}"
        try:
            changed: Any = getattr(run, parent) if parent else run
            changed = replace(changed, **{leaf: value})
            is_number = not isinstance(getattr(changed, leaf), bool)
            run = replace(run, **{parent: changed}) if parent else changed  # type: ignore[type-var]
        except ValidationError as error:
            raise ConfigError(f"{problem}: {from_validation_error(error).problem}") from error
        except ConfigError as error:
            raise ConfigError(f"{problem}: {error.problem}") from error
        except (AttributeError, TypeError) as error:
            problem = f"the run has no field {name!r}"
            raise ConfigError(problem, fix="name a field such as training.epochs") from error
        if isinstance(value, bool) and is_number:
            raise ConfigError(f"{problem}, which is no number")
    return run
