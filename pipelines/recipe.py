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

from as2ray.distributed.cluster import ray_session
from as2ray.distributed.plan import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.presets import parse_measure
from as2ray.losses import ConfigurableLoss, get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.exits import ExitLoss
from as2ray.tables.filters import QuestionFilter
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig

T = TypeVar("T")

Leaks = Literal["error", "drop", "keep"]
"""What to do with training questions that stand in a dev or test table too."""


@dataclass(frozen=True)
class TableSpec:
    """A table to train or evaluate on: a split of a corpus, and what is done to it."""

    corpus: str
    """Name of a corpus (`as2ray corpora list`)."""
    split: str
    """One of its splits."""
    question_filter: QuestionFilter = "raw"
    """Questions that are kept: `raw`, `no_all_negative` or `clean`."""
    corpus_options: dict[str, Any] = field(default_factory=dict)
    """The corpus' own options."""
    label_noise: float = 0.0
    """Part of the labels that is turned over (TANDA, Table 5)."""
    num_questions: int | None = None
    """Draw so many questions."""
    max_negatives: int | None = None
    """Draw at most so many negatives of each question."""
    seed: int = 0
    """Of these draws."""

    def __post_init__(self) -> None:
        numbers = {
            "questions": self.num_questions,
            "negatives": self.max_negatives,
            "seed": self.seed,
        }
        least = {"questions": 1, "negatives": 0, "seed": 0}
        wrong = {n: v for n, v in numbers.items() if v is not None and v < least[n]}
        if wrong or not 0 <= self.label_noise <= 1:
            raise ConfigError(
                f"table of {self.corpus!r} with {wrong or f'noise {self.label_noise}'}"
                "; expected questions >= 1, negatives and seed >= 0, noise from 0 to 1",
            )


@dataclass(frozen=True)
class Step:
    """One training run, and a row of the results."""

    train: list[str]
    """Names of the tables to train on; several are one corpus (a union)."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Its settings."""
    init_from: str | None = None
    """The step whose ranker it starts from; by default the recipe's model."""
    dev: str | None = None
    """The table that selects its best checkpoint; by default the recipe's."""
    model: str | None = None
    """Another encoder or ranker to start from than the recipe's: a folder or a hub id."""
    num_layers: int | None = None
    """Keep the first layers only."""
    exit_layers: tuple[int, ...] | None = None
    """Make a cascade with exits after these layers; a step that starts from one goes on with it."""
    num_ranking_heads: int = 0
    """CERBERUS's heads after the last exit: a copy each of the layers above it."""
    loss: str | ConfigurableLoss = "cross_entropy"
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
    model: ModelSpec
    """What to start from."""
    tables: dict[str, TableSpec]
    """Tables by name."""
    dev: str
    """Name of the table that selects checkpoints."""
    tests: list[str]
    """Names of the tables that are reported."""
    runs: dict[str, Step]
    """Steps by name, each after those it starts from."""
    baseline: str | dict[str, str]
    """System against which the others are tested, or for each reported table its own."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Each step is trained once with each."""
    measures: list[str] = field(default_factory=lambda: ["AP", "RR", "P@1"])
    """Names of ir-measures."""
    question_filter: QuestionFilter = "clean"
    """Questions of the tests that count."""
    on_leak: Leaks = "error"
    """What to do with training questions that stand in a dev or test table."""
    plot_learning_curves: bool = False
    """Follow the tests' MAP during training and draw it (Figure 4); selects nothing by it."""
    published_results: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """For each test, numbers that papers print, by name and measure."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """What follows the runs."""

    def __post_init__(self) -> None:
        check_names("step", self.runs)
        check_names("table", self.tables)
        names = {self.dev, *self.reported()}
        for name, step in self.runs.items():
            names |= {*step.train, *([step.dev] if step.dev else [])}
            before = list(self.runs)[: list(self.runs).index(name)]
            needed = [*([step.init_from] if step.init_from else []), *step.teachers]
            if not set(needed) <= set(before):
                raise ConfigError(
                    f"step {name!r} starts from {step.init_from!r} and learns from {step.teachers}"
                    f"; expected steps before it: {before}",
                )
            there = set(self.seeds).intersection(*(self.seeds_of(other) for other in needed))
            if not there.issuperset(own := self.seeds_of(name)) or not own:
                raise ConfigError(
                    f"step {name!r} with seeds {own}"
                    f"; expected some of {sorted(there)}: the recipe's, its start's, its teachers'",
                )
            self._refuse_unfit(name)
            self._refuse_tables(name)
        selecting = {self.dev, *(step.dev for step in self.runs.values())} - {None}
        if "dev" in self.tests and selecting != {"dev"}:
            raise ConfigError(
                "a test named 'dev' beside other tables that select checkpoints"
                "; expected another name: in what is logged `dev` is the table that selects",
                fix="rename the table",
            )
        if unknown := sorted(names - self.tables.keys()):
            raise ConfigError(
                f"tables {unknown} are named but not described"
                f"; expected some of {sorted(self.tables)}",
                fix="describe them under `tables`",
            )
        if not self.measures or not self.reported() or any(s < 0 for s in self.seeds):
            raise ConfigError(
                f"measures {self.measures}, reports of {self.reported()}, seeds {self.seeds}"
                "; expected at least one measure and one table to report, seeds of 0 or more",
            )
        for measure in self.measures:
            parse_measure(measure)
        if unknown := sorted(n for n in self.published_results if n not in self.may_print()):
            raise ConfigError(
                f"published numbers of {unknown}; expected some of {sorted(self.may_print())}",
                fix="name a table that is reported",
            )
        systems = self.systems()
        baselines = {test: self.against(test) for test in self.reported()}
        if wrong := {t: b for t, b in baselines.items() if b not in systems}:
            raise ConfigError(
                f"baseline {wrong}; expected one of {systems}",
            )

    def _refuse_unfit(self, name: str) -> None:
        """A step whose model and objective do not go together; before any other is trained."""
        step, exits, heads = self.runs[name], self.exits_of(name), self.heads_of(name)
        asked = get_loss(step.loss)
        if step.init_from and step.model:
            raise ConfigError(
                f"step {name!r} starts from step {step.init_from!r} and from {step.model!r}"
                "; expected one of the two",
                fix="leave `start` or `model` out",
            )
        if bool(step.teachers) != isinstance(asked, DistillationLoss):
            raise ConfigError(
                f"step {name!r} with objective {step.loss!r} and teachers {step.teachers}"
                "; expected teachers for distillation, and for no other objective",
                fix="describe `objective` by alpha and temperature, or name no teachers",
            )
        # A list is never cut: it is the least that a packed batch must hold.
        least = self.model.max_length * getattr(asked, "candidates", 1)
        if step.training.max_batch_tokens < least:
            raise ConfigError(
                f"step {name!r} with max_tokens {step.training.max_batch_tokens:,}"
                f"; expected at least {least:,}: max_length, or that of a whole list",
                fix="raise training.max_tokens, or make lists shorter",
            )
        if isinstance(asked, DistillationLoss):
            asked.check_counts(max(1, heads), len(step.teachers))
        elif bool(exits) != isinstance(asked, ExitLoss) or (heads and not exits):
            raise ConfigError(
                f"step {name!r} with objective {step.loss!r}, exits {list(exits)}, {heads} heads"
                "; expected exits, heads after them if any, and an objective such as 'uniform_exit'; "
                "or no exits, and another",
                fix="name the cascade's `exits`, or another objective",
            )

    def _refuse_tables(self, name: str) -> None:
        """A step that trains on nothing, twice on one table, or on what it is measured on."""
        step, held_out = self.runs[name], self.held_out()
        fine = len(step.train) == len(set(step.train)) > 0
        # The run's dev table has this name in a stage's identity.
        fine = fine and ("dev" not in step.train or (step.dev or self.dev) == "dev")
        if not fine or (self.on_leak != "keep" and held_out & set(step.train)):
            raise ConfigError(
                f"step {name!r} trains on {step.train}; held out are {sorted(held_out)}"
                "; expected at least one table, each once, none named 'dev' but dev, and none that "
                "is held out unless `leaks` is `keep`",
                fix="name a table of the training split",
            )

    def held_out(self) -> set[str]:
        """The tables that select checkpoints or are reported."""
        return {self.dev, *self.reported(), *(s.dev for s in self.runs.values() if s.dev)}

    def systems(self) -> list[str]:
        """Names of what the reports compare, any of which may be the baseline."""
        return list(self.runs)

    def reported(self) -> list[str]:
        """The tables that are reported."""
        return self.tests

    def may_print(self) -> set[str]:
        """Names of the reports, beside which papers' numbers may stand."""
        return set(self.reported())

    def seeds_of(self, step: str) -> list[int]:
        """The seeds that a step is trained with."""
        own = self.runs[step].seeds
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
            raise ConfigError(
                f"{name!r} is made of steps with seeds {of_each}"
                "; expected at least one seed that all of them have",
            )
        return shared

    def exits_of(self, step: str) -> tuple[int, ...]:
        """Exits of the cascade that a step trains, its own or its start's; none of another."""
        found = self.runs[step]
        return found.exit_layers or (self.exits_of(found.init_from) if found.init_from else ())

    def heads_of(self, step: str) -> int:
        """CERBERUS's heads of what a step trains, its own or its start's."""
        found = self.runs[step]
        return found.num_ranking_heads or (self.heads_of(found.init_from) if found.init_from else 0)

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
            raise ConfigError(
                f"a {what} named {name!r}"
                "; expected letters, digits and . + - _: it names folders and runs",
            )


def read_recipe(
    kind: type[T], arguments: Sequence[str] | None = None
) -> tuple[T, str, WorkersConfig, dict[str, str]]:
    """The recipe, output folder, workers and sources that a command line asks for.

    Args:
        kind: Dataclass of the recipe; its fields are flags and keys of the YAML file.
        arguments: The command line; by default this process'.
    """
    parser = ArgumentParser(description=kind.__doc__)
    parser.add_argument("--config", action="config", help="a recipe: a YAML file of these keys")
    parser.add_class_arguments(kind, as_group=False)
    parser.add_argument("--output", type=str, required=True, help="folder of the stages")
    parser.add_argument(
        "--workers", type=WorkersConfig, default=WorkersConfig(), help="part of the cluster"
    )
    profiles = "plans for `--workers` by name; they change nothing of the result"
    parser.add_argument("--profiles", type=dict[str, WorkersConfig], default={}, help=profiles)
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
            raise ConfigError(
                f"profile {asked.profile!r}; expected one of {sorted(asked.profiles)}",
                fix="name one, or describe it under `profiles`",
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
    with ray_session() if workers.num_workers or searches else nullcontext():
        run(recipe, output, workers, sources)
