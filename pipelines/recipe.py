"""What every recipe is made of, tables and steps, and the command line that reads it.

Knows jsonargparse. Must not know what a pipeline does with a recipe.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentParser

from as2ray.distributed.cluster import connected
from as2ray.distributed.plan import Workers
from as2ray.errors import RecipeError
from as2ray.evaluation.presets import as_measure
from as2ray.filters import Filter
from as2ray.objectives import Distillation, Exits, WithSettings, objective
from as2ray.training.config import Training
from as2ray.training.job import Model
from as2ray.training.tracking import Tracking

T = TypeVar("T")

Leaks = Literal["error", "drop", "keep"]
"""What to do with training questions that stand in a dev or test table too."""


@dataclass(frozen=True)
class Data:
    """A table to train or evaluate on: a split of a corpus, and what is done to it."""

    corpus: str
    """Name of a corpus (`as2ray corpora list`)."""
    split: str
    """One of its splits."""
    filter: Filter = "raw"
    """Questions that are kept: `raw`, `no_all_negative` or `clean`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The corpus' own options."""
    noise: float = 0.0
    """Part of the labels that is turned over (TANDA, Table 5)."""
    questions: int | None = None
    """Draw so many questions."""
    negatives: int | None = None
    """Draw at most so many negatives of each question."""
    seed: int = 0
    """Of these draws."""

    def __post_init__(self) -> None:
        numbers = {"questions": self.questions, "negatives": self.negatives, "seed": self.seed}
        least = {"questions": 1, "negatives": 0, "seed": 0}
        wrong = {n: v for n, v in numbers.items() if v is not None and v < least[n]}
        if wrong or not 0 <= self.noise <= 1:
            raise RecipeError(
                f"table of {self.corpus!r} with {wrong or f'noise {self.noise}'}",
                expected="questions >= 1, negatives and seed >= 0, noise from 0 to 1",
                mend="correct the recipe",
            )


@dataclass(frozen=True)
class Step:
    """One training run, and a row of the results."""

    train: list[str]
    """Names of the tables to train on; several are one corpus (a union)."""
    training: Training = field(default_factory=Training)
    """Its settings."""
    start: str | None = None
    """The step whose ranker it starts from; by default the recipe's model."""
    dev: str | None = None
    """The table that selects its best checkpoint; by default the recipe's."""
    model: str | None = None
    """Another encoder or ranker to start from than the recipe's: a folder or a hub id."""
    layers: int | None = None
    """Keep the first layers only."""
    exits: tuple[int, ...] | None = None
    """Make a cascade with exits after these layers; a step that starts from one goes on with it."""
    heads: int = 0
    """CERBERUS's heads after the last exit: a copy each of the layers above it."""
    objective: str | WithSettings = "cross_entropy"
    """Name of the loss; a cascade's is `uniform_exit` in the paper. Or the settings of a loss that
    has any: distillation, lists of a question's candidates, margin, a joint model's."""
    teachers: list[str] = field(default_factory=list)
    """Steps before it whose rankers' stored logits it learns from."""
    seeds: list[int] | None = None
    """Those of the recipe's seeds that it is trained with; by default all."""


@dataclass(frozen=True)
class Recipe:
    """What to prepare, which steps to train, what to compare."""

    title: str
    """Heading of the report."""
    model: Model
    """What to start from."""
    tables: dict[str, Data]
    """Tables by name."""
    dev: str
    """Name of the table that selects checkpoints."""
    tests: list[str]
    """Names of the tables that are reported."""
    steps: dict[str, Step]
    """Steps by name, each after those it starts from."""
    baseline: str | dict[str, str]
    """System against which the others are tested, or for each reported table its own."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Each step is trained once with each."""
    measures: list[str] = field(default_factory=lambda: ["AP", "RR", "P@1"])
    """Names of ir-measures."""
    filter: Filter = "clean"
    """Questions of the tests that count."""
    leaks: Leaks = "error"
    """What to do with training questions that stand in a dev or test table."""
    curves: bool = False
    """Follow the tests' MAP during training and draw it (Figure 4); selects nothing by it."""
    published: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """For each test, numbers that papers print, by name and measure."""
    tracking: Tracking = field(default_factory=Tracking)
    """What follows the runs."""

    def __post_init__(self) -> None:
        check_names("step", self.steps)
        check_names("table", self.tables)
        names = {self.dev, *self.reported()}
        for name, step in self.steps.items():
            names |= {*step.train, *([step.dev] if step.dev else [])}
            before = list(self.steps)[: list(self.steps).index(name)]
            needed = [*([step.start] if step.start else []), *step.teachers]
            if not set(needed) <= set(before):
                raise RecipeError(
                    f"step {name!r} starts from {step.start!r} and learns from {step.teachers}",
                    expected=f"steps before it: {before}",
                    mend="put the steps in order",
                )
            there = set(self.seeds).intersection(*(self.seeds_of(other) for other in needed))
            if not there.issuperset(own := self.seeds_of(name)) or not own:
                raise RecipeError(
                    f"step {name!r} with seeds {own}",
                    expected=f"some of {sorted(there)}: the recipe's, its start's, its teachers'",
                    mend="correct the step's seeds",
                )
            self._refuse_unfit(name)
            self._refuse_tables(name)
        selecting = {self.dev, *(step.dev for step in self.steps.values())} - {None}
        if "dev" in self.tests and selecting != {"dev"}:
            raise RecipeError(
                "a test named 'dev' beside other tables that select checkpoints",
                expected="another name: in what is logged `dev` is the table that selects",
                mend="rename the table",
            )
        if unknown := sorted(names - self.tables.keys()):
            raise RecipeError(
                f"tables {unknown} are named but not described",
                expected=f"some of {sorted(self.tables)}",
                mend="describe them under `tables`",
            )
        if not self.measures or not self.reported() or any(s < 0 for s in self.seeds):
            raise RecipeError(
                f"measures {self.measures}, reports of {self.reported()}, seeds {self.seeds}",
                expected="at least one measure and one table to report, seeds of 0 or more",
                mend="name them",
            )
        for measure in self.measures:
            as_measure(measure)
        if unknown := sorted(n for n in self.published if n not in self.may_print()):
            raise RecipeError(
                f"published numbers of {unknown}",
                expected=f"some of {sorted(self.may_print())}",
                mend="name a table that is reported",
            )
        systems = self.systems()
        baselines = {test: self.against(test) for test in self.reported()}
        if wrong := {t: b for t, b in baselines.items() if b not in systems}:
            raise RecipeError(
                f"baseline {wrong}",
                expected=f"one of {systems}",
                mend="name one",
            )

    def _refuse_unfit(self, name: str) -> None:
        """A step whose model and objective do not go together; before any other is trained."""
        step, exits, heads = self.steps[name], self.exits_of(name), self.heads_of(name)
        asked = objective(step.objective)
        if step.start and step.model:
            raise RecipeError(
                f"step {name!r} starts from step {step.start!r} and from {step.model!r}",
                expected="one of the two",
                mend="leave `start` or `model` out",
            )
        if bool(step.teachers) != isinstance(asked, Distillation):
            raise RecipeError(
                f"step {name!r} with objective {step.objective!r} and teachers {step.teachers}",
                expected="teachers for distillation, and for no other objective",
                mend="describe `objective` by alpha and temperature, or name no teachers",
            )
        # A list is never cut: it is the least that a packed batch must hold.
        least = self.model.max_length * getattr(asked, "candidates", 1)
        if step.training.max_tokens < least:
            raise RecipeError(
                f"step {name!r} with max_tokens {step.training.max_tokens:,}",
                expected=f"at least {least:,}: max_length, or that of a whole list",
                mend="raise training.max_tokens, or make lists shorter",
            )
        if isinstance(asked, Distillation):
            asked.check(max(1, heads), len(step.teachers))
        elif bool(exits) != isinstance(asked, Exits) or (heads and not exits):
            raise RecipeError(
                f"step {name!r} with objective {step.objective!r}, exits {list(exits)}, "
                f"{heads} heads",
                expected="exits, heads after them if any, and an objective such as 'uniform_exit'; "
                "or no exits, and another",
                mend="name the cascade's `exits`, or another objective",
            )

    def _refuse_tables(self, name: str) -> None:
        """A step that trains on nothing, twice on one table, or on what it is measured on."""
        step, held_out = self.steps[name], self.held_out()
        fine = len(step.train) == len(set(step.train)) > 0
        # The run's dev table has this name in a stage's identity.
        fine = fine and ("dev" not in step.train or (step.dev or self.dev) == "dev")
        if not fine or (self.leaks != "keep" and held_out & set(step.train)):
            raise RecipeError(
                f"step {name!r} trains on {step.train}; held out are {sorted(held_out)}",
                expected="at least one table, each once, none named 'dev' but dev, and none that "
                "is held out unless `leaks` is `keep`",
                mend="name a table of the training split",
            )

    def held_out(self) -> set[str]:
        """The tables that select checkpoints or are reported."""
        return {self.dev, *self.reported(), *(s.dev for s in self.steps.values() if s.dev)}

    def systems(self) -> list[str]:
        """Names of what the reports compare, any of which may be the baseline."""
        return list(self.steps)

    def reported(self) -> list[str]:
        """The tables that are reported."""
        return self.tests

    def may_print(self) -> set[str]:
        """Names of the reports, beside which papers' numbers may stand."""
        return set(self.reported())

    def seeds_of(self, step: str) -> list[int]:
        """The seeds that a step is trained with."""
        own = self.steps[step].seeds
        return self.seeds if own is None else own

    def seeds_shared(self, name: str, members: Sequence[str]) -> list[int]:
        """The seeds that each of several steps is trained with: those of a ranker made of them.

        Args:
            name: The ranker's.
            members: Steps of the recipe.

        Raises:
            RecipeError: There are none.
        """
        of_each = {member: self.seeds_of(member) for member in members}
        shared = [seed for seed in self.seeds if all(seed in own for own in of_each.values())]
        if not shared:
            raise RecipeError(
                f"{name!r} is made of steps with seeds {of_each}",
                expected="at least one seed that all of them have",
                mend="correct the steps' seeds",
            )
        return shared

    def exits_of(self, step: str) -> tuple[int, ...]:
        """Exits of the cascade that a step trains, its own or its start's; none of another."""
        found = self.steps[step]
        return found.exits or (self.exits_of(found.start) if found.start else ())

    def heads_of(self, step: str) -> int:
        """CERBERUS's heads of what a step trains, its own or its start's."""
        found = self.steps[step]
        return found.heads or (self.heads_of(found.start) if found.start else 0)

    def against(self, test: str) -> str | None:
        """The baseline of a test."""
        return self.baseline if isinstance(self.baseline, str) else self.baseline.get(test)


def check_names(what: str, names: Iterable[str]) -> None:
    """Refuses names that cannot name folders and runs.

    Raises:
        RecipeError: A name of other characters.
    """
    for name in names:
        if not re.fullmatch(r"[\w.+-]+", name):
            raise RecipeError(
                f"a {what} named {name!r}",
                expected="letters, digits and . + - _: it names folders and runs",
                mend="rename it",
            )


def read_recipe(
    kind: type[T], arguments: Sequence[str] | None = None
) -> tuple[T, str, Workers, dict[str, str]]:
    """The recipe, output folder, workers and sources that a command line asks for.

    Args:
        kind: Dataclass of the recipe; its fields are flags and keys of the YAML file.
        arguments: The command line; by default this process'.
    """
    parser = ArgumentParser(description=kind.__doc__)
    parser.add_argument("--config", action="config", help="a recipe: a YAML file of these keys")
    parser.add_class_arguments(kind, as_group=False)
    parser.add_argument("--output", type=str, required=True, help="folder of the stages")
    parser.add_argument("--workers", type=Workers, default=Workers(), help="part of the cluster")
    profiles = "plans for `--workers` by name; they change nothing of the result"
    parser.add_argument("--profiles", type=dict[str, Workers], default={}, help=profiles)
    parser.add_argument("--profile", type=str, help="one of them, which --workers.* may change")
    parser.add_argument(
        "--sources",
        type=dict[str, str],
        default={},
        help="for each corpus its folder; by default AS2RAY_DATA/<corpus>",
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    asked = parser.parse_args(arguments)
    if asked.profile is not None:
        if asked.profile not in asked.profiles:
            raise RecipeError(
                f"profile {asked.profile!r}",
                expected=f"one of {sorted(asked.profiles)}",
                mend="name one, or describe it under `profiles`",
            )
        parser.set_defaults(workers=asked.profiles[asked.profile])
        asked = parser.parse_args(arguments)
    made = vars(parser.instantiate(asked))
    for name in ("config", "profile", "profiles"):
        made.pop(name)
    output, workers, sources = (made.pop(name) for name in ("output", "workers", "sources"))
    return kind(**made), output, workers, sources


def described(kind: type[T]) -> T:
    """The dataclass that this process' command line describes; its fields are flags."""
    parser = ArgumentParser(description=kind.__doc__)
    parser.add_argument("--config", action="config", help="a YAML file of these keys")
    parser.add_class_arguments(kind, as_group=False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    made = vars(parser.instantiate(parser.parse_args()))
    made.pop("config")
    return kind(**made)


def command(kind: type[T], run: Callable[..., object], searches: bool = False) -> None:
    """The command line of a pipeline.

    Args:
        kind: Dataclass of its recipe.
        run: Takes recipe, output folder, workers and sources.
        searches: Whether it needs Ray in any case, for Tune.
    """
    recipe, output, workers, sources = read_recipe(kind)
    with connected() if workers.count or searches else nullcontext():
        run(recipe, output, workers, sources)
