"""Recipes: tables, training runs and systems to compare, and the options of a command line."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, field, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)
from pydantic.dataclasses import dataclass

from as2ray.corpora.registry import get_corpus
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, lookup, suggest
from as2ray.evaluation.presets import parse_measure
from as2ray.experiments.configuration import (
    merge_into,
    print_config,
    print_help,
    read_tree,
    validate,
)
from as2ray.losses import LOSSES, get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.exits import ExitLoss
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.plugins import is_import_path
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.ranking_order import TieBreaking
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, Pooling
from as2ray.training.tracking import TrackingConfig, is_in_job_copy

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid")
"""Unknown keys are errors."""

NON_EMPTY = Field(min_length=1)
"""At least one value."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""

FILE_KEYS = ("columns", "min_positive_grade", "max_bad_records", "split_shares")
"""Keys of a table that belong to its `path`."""

LeakPolicy = Literal["error", "drop", "keep"]
"""What to do with training questions that are also in a dev or test table."""


def _loss_type(loss: Any) -> str | None:
    """Tag of a loss in the union below; None where there is no `type`."""
    if isinstance(loss, str):
        return "name"
    return loss.get("type") if isinstance(loss, Mapping) else getattr(loss, "type", None)


def _check_loss_name(loss: Any) -> Any:
    if isinstance(loss, str) and loss not in LOSSES and not is_import_path(loss):
        accepted = f"accepted are {sorted(LOSSES)}, `module:name`, or settings with a `type`"
        raise ValueError("; ".join(filter(None, ["unknown loss", accepted, suggest(loss, LOSSES)])))
    return loss


LossSpec = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[DistillationLoss, Tag("distillation")]
    | Annotated[ListwiseLoss, Tag("listwise_cross_entropy")]
    | Annotated[MarginRankingLoss, Tag("margin_ranking")]
    | Annotated[TwoInOneLoss, Tag("two_in_one")],
    Discriminator(
        _loss_type,
        custom_error_type="loss_type",
        custom_error_message="a loss is a name, or settings with a `type`: distillation, "
        "listwise_cross_entropy, margin_ranking or two_in_one",
    ),
    AfterValidator(_check_loss_name),
]
"""`loss: NAME`, a loss with settings, `loss: {type: distillation, alpha: 0.5}`, or one of your own,
`loss: my_losses:focal`: a function of the logits and the targets, or a `Loss`."""


@dataclass(frozen=True, config=STRICT)
class TableSpec:
    """A table to train or evaluate on: a split of a corpus or of a file, and how it is changed."""

    corpus: str = ""
    """Name of a corpus (`as2ray corpora list`), or `module:name` of one of your own."""
    split: str = ""
    """One of its splits; of `path` one of `split_shares` or `train`, by default all rows."""
    question_filter: QuestionFilter = "raw"
    """Questions to keep: `raw`, `no_all_negative` or `clean`."""
    corpus_options: dict[str, Any] = field(default_factory=dict)
    """Options of the corpus."""
    label_noise: Share = 0.0
    """Share of the labels that is flipped (TANDA, Table 5)."""
    num_questions: PositiveInt | None = None
    """Sample this number of questions."""
    max_negatives: NonNegativeInt | None = None
    """Sample at most this number of negatives of each question."""
    hard_negatives: NonNegativeInt = 0
    """So many of these negatives are those with the highest BM25, counted over the candidates of
    the question; the others are sampled at random."""
    seed: NonNegativeInt = 0
    """Seed of splits, sampling and label noise."""
    verify: bool = True
    """Whether the counts must be the published ones, if there are any."""
    path: str | None = None
    """Instead of a corpus: a file or folder (CSV, TSV, JSON lines, Parquet, `datasets`), or
    `hub:OWNER/NAME:SPLIT` (see `as2ray.load_table`)."""
    columns: dict[str, str] = field(default_factory=dict)
    """Of `path`: names of its columns, such as `{question: q, candidate: text, label: y}`."""
    min_positive_grade: float | None = None
    """Of `path`: lowest grade that counts as an answer; by default labels are 0 and 1."""
    max_bad_records: NonNegativeInt = 0
    """Of `path`: number of rows that may be left out because they cannot be used."""
    split_shares: dict[str, Share] = field(default_factory=dict)
    """Of `path`: share of the questions of each split but `train`: `{dev: 0.1, test: 0.1}`."""

    def __post_init__(self) -> None:
        if self.hard_negatives > (self.max_negatives or 0):
            raise ConfigError(
                f"hard_negatives={self.hard_negatives} are more than "
                f"max_negatives={self.max_negatives}, of which they are a part"
            )
        if self.path is None:
            file_keys = {f.name: getattr(self, f.name) for f in fields(self) if f.name in FILE_KEYS}
            if not (self.corpus and self.split) or any(file_keys.values()):
                given = ", ".join(f"{name}={value!r}" for name, value in file_keys.items() if value)
                raise ConfigError(
                    f"a table has corpus={self.corpus!r}, split={self.split!r}, no path"
                    f"{given and f', {given}'}; it needs `corpus` and `split`, or `path`"
                )
            lookup(get_corpus(self.corpus).files, self.split, f"{self.corpus} split")
        elif self.corpus or self.corpus_options:
            raise ConfigError(f"a table has the corpus {self.corpus!r} and the path {self.path!r}")
        elif self.split and self.split not in (*self.split_shares, "train"):
            accepted = sorted({*self.split_shares, "train"})
            raise ConfigError(f"split {self.split!r} of {self.path}; `split_shares` has {accepted}")


@dataclass(frozen=True, config=STRICT)
class RunSpec:
    """A training run, and a row of the results."""

    train: Annotated[list[str], NON_EMPTY]
    """Names of the tables to train on; several are read as one corpus."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Hyperparameters."""
    train_weights: dict[str, PositiveFloat] = field(default_factory=dict)
    """Weight of each pair's loss by the name of its training table, by default 1 (TANDA, section
    3.2); for cross entropy."""
    init_from: str | None = None
    """An earlier run whose ranker is trained further; by default the recipe's model."""
    dev: str | None = None
    """Name of the table that selects the best checkpoint; by default the recipe's."""
    model: str | None = None
    """Folder or hub id of an encoder or ranker to start from instead of the recipe's."""
    num_layers: PositiveInt | None = None
    """Keep only the first layers of the encoder."""
    exit_layers: tuple[PositiveInt, ...] | None = None
    """Make a cascade with exits after these layers. A run that starts from a cascade keeps its
    exits."""
    pooling: Pooling | None = None
    """Input of the partial classifiers of a new cascade, instead of the recipe's model's."""
    num_ranking_heads: NonNegativeInt = 0
    """CERBERUS's heads after the last exit; each is a copy of the layers above it."""
    loss: LossSpec = "cross_entropy"
    """Name of a loss (the Cascade Transformer's is `uniform_exit`), a loss with settings, or
    `module:name` of one of your own."""
    teachers: list[str | Annotated[list[str], NON_EMPTY]] = field(default_factory=list)
    """Earlier runs whose rankers are the teachers; a list of runs is one teacher, with the mean of
    their probabilities (CERBERUS, section 3.2)."""
    seeds: Annotated[list[NonNegativeInt], NON_EMPTY] | None = None
    """Subset of the recipe's seeds; by default all of them."""

    @property
    def teaching_runs(self) -> list[str]:
        """Runs that are teachers, or members of one."""
        groups = ([each] if isinstance(each, str) else each for each in self.teachers)
        return [name for group in groups for name in group]


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """Tables to prepare, runs to train and systems to compare."""

    title: str
    """Heading of the report."""
    model: ModelSpec
    """Pretrained model to start from."""
    tables: dict[str, TableSpec]
    """Tables by name."""
    dev: str
    """Name of the table that selects checkpoints."""
    tests: list[str]
    """Names of the tables that are reported."""
    runs: dict[str, RunSpec]
    """Training runs by name, each after those it starts from."""
    baseline: str | dict[str, str]
    """System against which the others are tested; or a system for each reported table."""
    seeds: list[NonNegativeInt] = field(default_factory=lambda: [0, 1, 2])
    """Each run is trained once with each seed."""
    measures: Annotated[list[str], NON_EMPTY] = field(default_factory=lambda: ["AP", "RR", "P@1"])
    """Names of ir-measures; they measure labels, not grades."""
    question_filter: QuestionFilter = "clean"
    """Questions of the tests that are evaluated."""
    on_leak: LeakPolicy = "error"
    """What to do with training questions that are also in a dev or test table."""
    min_leak_similarity: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of common words (Jaccard) from which two questions are the same to `on_leak`; by
    default only equal texts are. FlexNeuART takes 0.75."""
    ties: TieBreaking = "pessimistic"
    """Order of equal scores of rankers; TANDA's own evaluation is `optimistic`."""
    plot_learning_curves: bool = False
    """Evaluate on the tests during training and plot the measures (Figure 4); it selects
    nothing."""
    published_results: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Results that papers print, by test, system and measure; `parameters` is a number of
    weights."""
    reproduces: dict[str, dict[str, str]] = field(default_factory=dict)
    """Which of the `published_results` a system reproduces, by test and system; the reports show
    both with their difference."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Trackers of the runs."""

    def __post_init__(self) -> None:
        check_names("run", self.runs)
        check_names("table", self.tables)
        self._check_seeds()
        for number, (name, run) in enumerate(self.runs.items()):
            earlier = list(self.runs)[:number]
            sources = [*([run.init_from] if run.init_from else []), *run.teaching_runs]
            if not set(sources) <= set(earlier):
                raise ConfigError(
                    f"run {name!r} has init_from {run.init_from!r} and teachers {run.teachers}; "
                    f"both must be among the runs before it: {earlier}"
                )
            shared = set(self.seeds).intersection(*(self.seeds_of(source) for source in sources))
            if not (seeds := self.seeds_of(name)) or not shared.issuperset(seeds):
                raise ConfigError(
                    f"run {name!r} has seeds {seeds}; the recipe and the runs that it builds on "
                    f"share the seeds {sorted(shared)}"
                )
            self._check_loss(name)
            self._check_tables(name)
        dev_tables = {self.dev, *(run.dev for run in self.runs.values())} - {None}
        if "dev" in self.tests and dev_tables != {"dev"}:
            problem = "a test is named 'dev', but other tables select, whose metrics have this name"
            raise ConfigError(problem, fix="rename the table")
        names = self.held_out().union(*(run.train for run in self.runs.values()))
        if unknown := sorted(names - self.tables.keys()):
            known = sorted(self.tables)
            problem = f"the tables {unknown} are not described; `tables` has {known}"
            raise ConfigError(problem, fix=suggest(unknown[0], known))
        if not self.reported():
            raise ConfigError("no table is reported; name at least one under `tests`")
        for measure in self.measures:
            parse_measure(measure, "label")
        reports = sorted(self.may_print())
        if unknown := sorted(self.published_results.keys() - reports):
            raise ConfigError(f"published_results of {unknown}; the reports are {reports}")
        systems = self.systems()
        for test, pairs in self.reproduces.items():
            published = self.published_results.get(test, {})
            if not (pairs.keys() <= set(systems) and {*pairs.values()} <= published.keys()):
                raise ConfigError(
                    f"reproduces {pairs} on {test!r}; the systems are {systems}, and the published "
                    f"results {sorted(published)}"
                )
        baselines = {test: self.against(test) for test in self.reported()}
        if wrong := {t: b for t, b in baselines.items() if b not in systems}:
            raise ConfigError(f"the baselines {wrong} are not among the systems {systems}")

    def _check_seeds(self) -> None:
        for seeds in (self.seeds, *map(self.seeds_of, self.runs)):
            if len(set(seeds)) < len(seeds):
                raise ConfigError(f"seeds {seeds} has a seed twice", fix="name each once")

    def _check_loss(self, name: str) -> None:
        """Checks that a run's model, loss and teachers go together, before any run is trained."""
        run, exits, num_heads = self.runs[name], self.exits_of(name), self.heads_of(name)
        loss = get_loss(run.loss)
        if not run.train_weights.keys() <= ({*run.train} if run.loss == "cross_entropy" else set()):
            raise ConfigError(
                f"run {name!r} has train_weights {run.train_weights}, loss {run.loss!r} and trains "
                f"on {run.train}; weights are of its tables, and for cross_entropy"
            )
        if run.init_from and run.model:
            raise ConfigError(
                f"run {name!r} starts from run {run.init_from!r} and from model {run.model!r}",
                fix="leave out `init_from` or `model`",
            )
        if bool(run.teachers) != isinstance(loss, DistillationLoss):
            raise ConfigError(
                f"run {name!r} has loss {run.loss!r} and teachers {run.teachers}; distillation "
                "needs teachers, and no other loss has any",
                fix="set `loss: {type: distillation, ...}`, or remove the teachers",
            )
        # A list is never split, so a packed batch must hold a whole one.
        min_tokens = self.model.max_length * getattr(loss, "list_size", 1)
        if run.training.max_batch_tokens < min_tokens:
            raise ConfigError(
                f"run {name!r} has max_batch_tokens {run.training.max_batch_tokens:,}, which must "
                f"be at least {min_tokens:,}: the maximum length of a pair, or of a whole list",
                fix="raise training.max_batch_tokens, or shorten the lists",
            )
        if isinstance(loss, DistillationLoss):
            loss.check_counts(max(1, num_heads), len(run.teachers))
        elif bool(exits) != isinstance(loss, ExitLoss) or (num_heads and not exits):
            raise ConfigError(
                f"run {name!r} has loss {run.loss!r}, exit_layers {list(exits)} and {num_heads} "
                "ranking heads; exits and a loss such as 'uniform_exit' need each other, and heads "
                "need exits below them",
                fix="set `exit_layers`, or choose another loss",
            )

    def _check_tables(self, name: str) -> None:
        """Checks that a run has tables, each once, and does not train on a held-out table."""
        run, held_out = self.runs[name], self.held_out()
        is_listed_twice = len(run.train) > len(set(run.train))
        # In the inputs of a stage, the run's dev table has this name.
        hides_dev = "dev" in run.train and (run.dev or self.dev) != "dev"
        is_held_out = self.on_leak != "keep" and held_out & set(run.train)
        if is_listed_twice or hides_dev or is_held_out:
            raise ConfigError(
                f"run {name!r} trains on {run.train}, and {sorted(held_out)} are held out; a run "
                "names each table once, none of them held out (unless `on_leak` is `keep`), and "
                "no table 'dev' except its dev table"
            )

    def held_out(self) -> set[str]:
        """Returns the names of the tables that select checkpoints or are reported."""
        return {self.dev, *self.reported(), *(run.dev for run in self.runs.values() if run.dev)}

    def systems(self) -> list[str]:
        """Returns the names of the systems that are compared; each may be the baseline."""
        return list(self.runs)

    def reported(self) -> list[str]:
        """Returns the names of the tables that are reported."""
        return self.tests

    def may_print(self) -> set[str]:
        """Returns the names of the reports, which may have published results."""
        return set(self.reported())

    def seeds_of(self, run: str) -> list[int]:
        """Returns the seeds that a run is trained with."""
        seeds = self.runs[run].seeds
        return self.seeds if seeds is None else seeds

    def seeds_shared(self, name: str, members: Sequence[str]) -> list[int]:
        """Returns the seeds that all of several runs are trained with.

        Args:
            name: Name of the ranker that is made of these runs, for the error.
            members: Runs of the recipe.

        Raises:
            ConfigError: There is no such seed.
        """
        seeds_of_members = {member: self.seeds_of(member) for member in members}
        shared = [s for s in self.seeds if all(s in seeds for seeds in seeds_of_members.values())]
        if not shared:
            problem = f"{name!r} is made of runs that share no seed; theirs are {seeds_of_members}"
            raise ConfigError(problem)
        return shared

    def exits_of(self, run: str) -> tuple[int, ...]:
        """Returns the exits of a run's ranker, its own or those it starts from; () without any."""
        spec = self.runs[run]
        return spec.exit_layers or (self.exits_of(spec.init_from) if spec.init_from else ())

    def heads_of(self, run: str) -> int:
        """Returns the number of heads of a run's ranker, its own or those it starts from."""
        spec = self.runs[run]
        return spec.num_ranking_heads or (self.heads_of(spec.init_from) if spec.init_from else 0)

    def against(self, test: str) -> str | None:
        """Returns the baseline of a test."""
        return self.baseline if isinstance(self.baseline, str) else self.baseline.get(test)


def check_names(kind: str, names: Iterable[str]) -> None:
    """Checks that names can be names of folders.

    Args:
        kind: What the names are of, for the error.
        names: The names.

    Raises:
        ConfigError: A name has other characters than letters, digits and `. + - _`.
    """
    for name in names:
        if not re.fullmatch(r"[\w.+-]+", name):
            problem = f"the {kind} name {name!r} names a folder"
            raise ConfigError(f"{problem}; it may only have letters, digits and . + - _")


@dataclass(frozen=True, config=STRICT)
class RunOptions:
    """Where and how a recipe runs. It does not change the results."""

    output: Annotated[str, NON_EMPTY]
    """Folder of the reports, and of links to the stages."""
    store: Annotated[str, NON_EMPTY] | None = None
    """Folder or URI of the stages (`s3://`, `gs://`); by default `store` beside the output."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """Part of the cluster to use."""
    profiles: dict[str, WorkersConfig] = field(default_factory=dict)
    """Settings of `workers` by name."""
    profile: str | None = None
    """Name of a profile; `--workers.*` changes it."""
    data_dirs: dict[str, str] = field(default_factory=dict)
    """Folder of each corpus; by default AS2RAY_DATA/<corpus>."""
    max_parallel: PositiveInt | None = None
    """Maximum number of stages that run at the same time; 1 keeps the order of the recipe. By
    default 1 without Ray, and with Ray what the memory of the driver's node holds."""
    dry_run: bool = False
    """Print the stages and their estimated hours, and run nothing."""
    fail_fast: bool = False
    """Start no further stage after the first failure."""
    quiet: bool = False
    """Show warnings, errors and results alone."""
    verbose: bool = False
    """Show the log of other libraries and of each training step, too."""
    json_log: bool = False
    """Write the log as one JSON object per line."""

    def __post_init__(self) -> None:
        paths = {"output": self.output, "store": self.store}
        for flag, path in {**paths, "workers.storage_path": self.workers.storage_path}.items():
            if path and "://" not in path and is_in_job_copy(path):
                problem = f"{flag}={path} is in the job's copy of its working directory"
                fix = f"give --{flag} as an absolute path"
                raise ConfigError(f"{problem}, which Ray does not keep", fix)


def read_recipe(kind: type[T], arguments: Sequence[str] | None = None) -> tuple[T, RunOptions]:
    """Reads the recipe and the options of a command line.

    Args:
        kind: Class of the recipe; its fields are flags and keys of the YAML file.
        arguments: The command line; by default this process's.

    Raises:
        ConfigError: A value or a key is wrong.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    kinds = [kind, RunOptions]
    print_help(kinds, arguments)
    tree = read_tree(kinds, arguments)
    options_tree = {f.name: tree.pop(f.name) for f in fields(RunOptions) if f.name in tree}
    options = validate(RunOptions, options_tree)
    if options.profile is not None and not options.profiles:
        problem = f"profile {options.profile!r}, and the recipe has no `profiles`"
        raise ConfigError(problem, fix="leave out --profile, or set --workers.*")
    if options.profile is not None:
        workers = asdict(lookup(options.profiles, options.profile, "profile"))
        merge_into(workers, options_tree.get("workers", {}))
        options = validate(RunOptions, {**options_tree, "workers": workers})
    try:
        recipe = validate(kind, tree, RunOptions)
    except ConfigError as error:
        required = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}  # type: ignore[arg-type]
        has_file = any(argument.partition("=")[0] == "--config" for argument in arguments)
        missing = required - tree.keys()
        if has_file or not missing:
            raise
        fix = "name a recipe: --config FILE; those of pipelines/recipes are found by their names"
        if len(missing) == 1:
            fix = f"give --{missing.pop()}, or a recipe with --config FILE"
        raise ConfigError(error.problem, fix) from None
    print_config([recipe, options], arguments)
    return recipe, options
