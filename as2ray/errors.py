"""Typed errors. Each states the problem and, where it is not obvious, how to fix it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from textwrap import shorten
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

P = ParamSpec("P")
T = TypeVar("T")

MAX_PROBLEMS = 5
"""Lines of an error about several fields."""


class As2rayError(Exception):
    """Base of every error that a user can cause and fix.

    Args:
        problem: What is wrong, with its numbers or names, and what is accepted.
        fix: What to do about it.
    """

    def __init__(self, problem: str, fix: str | None = None) -> None:
        self.problem, self.fix = problem, fix
        super().__init__(problem, fix)

    def __str__(self) -> str:
        return self.problem if self.fix is None else f"{self.problem}\n  fix: {self.fix}"


class CorpusError(As2rayError):
    """A raw release or a candidates table cannot be read as what it should be."""


class CountMismatchError(CorpusError):
    """A corpus does not hold the published numbers of questions, pairs and positives."""


class LeakError(CorpusError):
    """A question stands in two splits, or in a transfer and a target corpus."""


class CheckpointError(As2rayError):
    """A checkpoint has unknown, missing or misshapen weights, or is no ranker."""


class ConfigError(As2rayError):
    """A recipe or a command-line value is out of its range."""


class TrainingError(As2rayError):
    """A run of training cannot go on."""


class DivergedError(TrainingError):
    """The loss is not finite, on all workers alike; a repetition would end in the same way."""


class SearchError(TrainingError):
    """A search of hyperparameters has no trial from which to choose."""


class StaleStageError(As2rayError):
    """An output folder holds a stage that was made from something else."""


class ResourceError(As2rayError):
    """The cluster cannot give what the resource plan asks."""


class SentenceIndexError(As2rayError):
    """An index of documents is missing, broken, of another version, or cannot be written."""


class EvaluationError(As2rayError):
    """Scores and judgements do not fit together."""


def lookup(registry: Mapping[str, T], name: str, kind: str) -> T:
    """The entry of that name in a registry.

    Args:
        registry: Entries by name.
        name: The name to look up.
        kind: What the entries are, for the error: `corpus`, `loss`.

    Raises:
        ConfigError: The registry has no such entry.
    """
    if name not in registry:
        problem = f"unknown {kind} {name!r}; expected one of {sorted(registry)}"
        raise ConfigError(problem, fix=suggest(name, registry))
    return registry[name]


def suggest(name: str, accepted: Iterable[str]) -> str | None:
    """Returns the question whether a similar name was meant; None if there is no similar name."""
    accepted = list(accepted)
    near = get_close_matches(name, accepted, 1) or [each for each in accepted if name in each]
    return f"did you mean {near[0]!r}?" if near else None


def validate_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Checks and converts the arguments of each call of a function by its annotations.

    The function then raises a `ConfigError` that names an argument which does not fit.
    """
    from pydantic import ConfigDict, ValidationError, validate_call

    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)
    names = list(signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return validated(*args, **kwargs)
        except ValidationError as error:
            if error.title != function.__qualname__:  # of something that the function does
                raise
            wrong = error.errors(include_url=False)[0]
            name = wrong["loc"][0]
            name = names[name] if isinstance(name, int) else str(name)
            if not wrong["type"].startswith("missing"):
                name += "=" + shorten(repr(wrong["input"]), 100, placeholder=" ...")
            raise ConfigError(f"{name}: {wrong['msg']}") from None

    return call


def raise_config_errors(settings: type[T]) -> type[T]:
    """Lets the constructor of a pydantic dataclass raise a `ConfigError` that names wrong fields.

    Where the settings are part of others, their errors stay those of the others.
    """
    from pydantic import ValidationError

    init: Callable[..., None] = settings.__init__
    names = [field.name for field in fields(settings)]  # type: ignore[arg-type]

    @wraps(init)
    def call(self: T, *args: object, **kwargs: object) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise from_validation_error(
                error, known_keys=lambda path: () if path else names, positional=names
            ) from None

    settings.__init__ = call  # type: ignore[assignment, method-assign, misc]
    return settings


def from_validation_error(
    error: "ValidationError",
    kind: type[As2rayError] = ConfigError,
    known_keys: Callable[[Sequence[str]], Iterable[str]] = lambda path: (),
    positional: Sequence[str] = (),
) -> As2rayError:
    """An error with a line for each wrong field: its path, its value and what is accepted.

    Missing fields share a line, and there are at most `MAX_PROBLEMS` lines.

    Args:
        error: The error of pydantic.
        kind: Class of the error that is returned.
        known_keys: Returns the keys that are accepted beside a key, by the path above it.
        positional: Names of the fields that may be given by their positions.
    """
    problems, missing, hint = [], [], ""
    for wrong in error.errors(include_url=False):
        parts = [str(part) for part in wrong["loc"]]
        if positional and parts and isinstance(number := wrong["loc"][0], int):
            parts[:1] = positional[number : number + 1] or ["argument " + str(number + 1)]
        path = ".".join(parts)
        problem = wrong["msg"].removeprefix("Value error, ")
        if wrong["type"] in ("missing", "missing_argument"):
            missing.append(path)
            *above, owner = parts[:-1] or [""]  # A new entry may be a misspelled one.
            near = suggest(owner, {*known_keys(above)} - {owner}) if above else None
            hint = f"; {near}" if near else hint
        elif wrong["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            near = suggest(parts[-1], known_keys(parts[:-1]))
            problems.append(f"{path}: unknown key" + (f"; {near}" if near else ""))
        else:
            value = shorten(repr(wrong["input"]), 100, placeholder=" ...")
            problems.append(f"{path}={value}: {problem}" if path else problem)
    if missing:
        problems.append(f"{', '.join(missing)}: required, and not given{hint}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS - 1 :] = [f"and {len(problems) - MAX_PROBLEMS + 1} more"]
    return kind("\n".join(problems))
