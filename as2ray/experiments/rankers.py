"""Stages of rankers: trained, scored on a table, evaluated."""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.cascade.ranker_shape import RankerShape, check_model_spec
from as2ray.checkpoints.packaged import resolve_model_path, split_revision
from as2ray.data.packed_dataset import ORDER_VERSION
from as2ray.distributed.score import ScoreKind, read_scores, score_table
from as2ray.errors import ConfigError
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.experiments.executor import git_commit
from as2ray.experiments.recipe import LossSpec, Recipe
from as2ray.experiments.stage import NOT_IDENTITY, Outputs, Resources, Result, Stage, StageContext
from as2ray.experiments.store import Store
from as2ray.experiments.tables import TABLE, filtered_table
from as2ray.losses import source_digest
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.plugins import is_import_path
from as2ray.tables.atomic import atomic_file
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.parquet import write_part
from as2ray.tables.ranking_order import TieBreaking
from as2ray.tables.schema import LOGIT_COLUMNS, TableCounts
from as2ray.tables.source_files import check_files, describe_files, model_files
from as2ray.tables.trec import quote_names, write_run
from as2ray.training.checkpoint_store import STATE_FILE, hardlink_or_copy
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.tracking import (
    METRICS,
    RunDescription,
    TrackingConfig,
    calling_at_end,
    end_run,
)

RANKER = "ranker"
"""Folder of the checkpoint in a stage that makes a ranker, whatever its kind."""

CHANGED_MODEL_FIX = "give the changed model another path, or choose another --store or --output"
"""What to do when a model's folder is no longer what a stage was made of."""

UNKNOWN_HOURS = 0.01
"""Hours of a stage whose tables or model have no published size."""


@dataclass(frozen=True, eq=False)
class TrainedRanker(Stage):
    """The selected checkpoint of a training run, with its metrics."""

    RESOURCES: ClassVar[Resources] = "gang"

    model: ModelSpec
    train: tuple[Stage, ...]
    """Tables that are read as one corpus."""
    dev: Stage | None
    """Table that selects the checkpoint; None if the last one is kept."""
    training: TrainingConfig
    loss: LossSpec = "cross_entropy"
    init_from: Stage | None = None
    """Ranker that training starts from, instead of `model.path`."""
    train_weights: tuple[float, ...] = ()
    """Weight of the pairs of each training table; by default all have weight 1."""
    teacher_logits: tuple[tuple[Stage, ...], ...] = ()
    """For each teacher, its stored logits of each training table."""
    watched: dict[str, Stage] = field(default_factory=dict)
    """Other tables that are evaluated during training, by name."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig, metadata=NOT_IDENTITY)
    after: tuple[Stage, ...] = field(default=(), metadata=NOT_IDENTITY)
    """Checks that must succeed first."""

    def identity(self, fingerprints: Mapping[Stage, str]) -> dict[str, Any]:
        """Adds the version of the order of examples, and the source of a loss of the user's own.

        Leaves out the path of an unused model.
        """
        identity = {**super().identity(fingerprints), "order_version": ORDER_VERSION}
        if isinstance(self.loss, str) and is_import_path(self.loss):
            identity["loss_source"] = source_digest(self.loss)
        if self.init_from is not None:
            identity["model"]["path"] = ""
        return identity

    def check(self, results: Mapping[Stage, Result]) -> None:
        """Checks that the run can start from its model or from the earlier run."""
        self.shape(results)

    def shape(self, results: Mapping[Stage, Result]) -> RankerShape | None:
        """Returns layers, exits and heads of the ranker; None if its start is not known yet.

        Args:
            results: Complete stages; the models that these started from are not needed.

        Raises:
            ConfigError: Layers, exits or heads do not go with what the run starts from.
            CheckpointError: The model is neither an encoder nor a ranker.
        """
        if self in results:
            return _stored_shape(results[self])
        start, start_shape = self.init_from, None
        if start is None:
            num_layers = model_num_layers(self.model.path, self.model.max_length)
        else:
            stored = _stored_shape(results.get(start))
            start_shape = start.shape(results) if isinstance(start, TrainedRanker) else stored
            if start_shape is None:
                return None
            num_layers = start_shape.num_layers
        is_joint = isinstance(self.loss, TwoInOneLoss)
        extracts = isinstance(self.loss, TwoInOneLoss) and self.loss.answer_loss
        return check_model_spec(
            self.model, num_layers, start_shape, is_joint=is_joint, extract_answers=extracts
        )

    @property
    def evaluated(self) -> dict[str, Stage]:
        """Tables that are evaluated during training, by name."""
        return {**({"dev": self.dev} if self.dev else {}), **self.watched}

    def job(self, context: StageContext) -> TrainingJob:
        """Returns the training job with the folders of its inputs."""

        def paths(stages: Iterable[Stage]) -> tuple[str, ...]:
            return tuple(str(context.path(stage)) for stage in stages)

        start, evaluated = self.init_from, self.evaluated
        path = str(context.path(start) / RANKER) if start else resolve_model_path(self.model.path)
        return TrainingJob(
            model=replace(self.model, path=path),
            train_tables=paths(self.train),
            eval_tables=dict(zip(evaluated, paths(evaluated.values()))),
            training=self.training,
            loss=self.loss,
            train_weights=self.train_weights,
            teacher_logits=tuple(paths(logits) for logits in self.teacher_logits),
            tracking=self.tracking,
            run=self._describe_run(context),
        )

    def _describe_run(self, context: StageContext) -> RunDescription:
        """Returns what trackers show of the run."""
        label, digest = context.label, context.output.name
        tags = {
            "recipe": label.experiment,
            "run": label.name.rpartition("/")[2].partition("-seed")[0],
            "seed": str(self.training.seed),
            "digest": digest,
            "commit": git_commit() or "unknown",
        }
        name, folder = label.name or digest, str(context.output)
        key = _run_key(context)
        return RunDescription(name, label.experiment, key, folder=folder, tags=tags)

    def num_epochs(self, num_questions: float) -> int:
        """Returns the number of epochs on tables with this number of questions."""
        return self.training.epochs

    def run(self, context: StageContext) -> Outputs:
        """Trains; keeps the selected checkpoint, the metrics and the files of trackers."""
        run_folder, output, job = context.scratch / "run", context.output, self.job(context)
        with calling_at_end(partial(end_run, job.tracking, job.run)):
            if context.workers.num_workers:
                from as2ray.distributed.train import train_on_ray

                selected = train_on_ray(job, run_folder, context.workers, node_files=context.store)
            else:
                from as2ray.training.run_job import train

                selected = train(job, run_folder, context.workers.resume_interval_s)
        copy_ranker(selected, output)
        shutil.copy(run_folder / METRICS, output)
        progress = json.loads((selected.parent / STATE_FILE).read_text())
        return {**self.outputs(context), "precision": progress["precision"]}

    def outputs(self, context: StageContext) -> Outputs:
        """Returns what later stages check: the shape of the ranker, and its model's files."""
        return {
            "shape": self.shape(context.inputs),
            "model": describe_files(self._model_files()),
            "parameters": count_parameters(context.output / RANKER),
        }

    def verify(self, result: Result) -> None:
        """Refuses a run whose model folder has changed; one whose model is gone is kept."""
        check_files(
            result.outputs.get("model"), self._model_files(), self.model.path, CHANGED_MODEL_FIX
        )

    def _model_files(self) -> dict[str, Path]:
        return {} if self.init_from else model_files(self.model.path)

    def describe(self) -> Mapping[str, Any]:
        """See `Stage`."""
        from as2ray.experiments.cost_model import training_cost

        cost = training_cost(self)
        start = self.model.path if self.init_from is None else self.init_from
        return {
            "data": start,
            "loss": self.loss if isinstance(self.loss, str) else self.loss.type,
            "updates": cost.num_updates,
            "batch": self.training.global_batch_tokens or self.training.global_batch_size,
            "hours": cost.hours,
            "source": f"model {start}" if self.init_from is None else None,
        }

    def hours(self) -> float:
        """See `Stage`."""
        from as2ray.experiments.cost_model import training_cost

        return training_cost(self).hours or UNKNOWN_HOURS


def _run_key(context: StageContext) -> str:
    """Returns what tells the run of a stage from others, also after the store was moved."""
    path = context.scratch / "run_key"
    context.store.restore(path)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text(uuid4().hex)
        context.store.publish(path)
    return path.read_text()


class StoredScores(Stage):
    """Scores of the rows of a table, in the column `score`; `TableEvaluation` measures them."""

    table: Stage
    question_filter: QuestionFilter
    """Questions whose rows have scores."""


@dataclass(frozen=True, eq=False)
class TableScores(StoredScores):
    """A ranker's scores, or logits, of the rows of a table, in chunks."""

    RESOURCES = "pool"

    ranker: Stage
    table: Stage
    score_kind: ScoreKind = "score"
    question_filter: QuestionFilter = "raw"
    """Questions whose rows are scored."""
    drop_ratio: float | None = None
    """Drop ratio after every exit of a cascade, instead of its own."""

    def identity(self, fingerprints: Mapping[Stage, str]) -> dict[str, Any]:
        """Adds how a drop ratio is rounded."""
        rounding = {} if self.drop_ratio is None else {"rounding": "floor"}
        return {**super().identity(fingerprints), **rounding}

    def run(self, context: StageContext) -> Outputs:
        """Scores the chunks that an interrupted attempt has not written."""
        summary = score_table(
            context.path(self.table),
            context.path(self.ranker) / RANKER,
            context.output,
            context.workers,
            self.score_kind,
            context.store,
            question_filter=self.question_filter,
            drop_ratio=self.drop_ratio,
        )
        return asdict(summary)

    def hours(self) -> float:
        """See `Stage`."""
        from as2ray.experiments.cost_model import scoring_cost

        return scoring_cost(self).hours or UNKNOWN_HOURS


@dataclass(frozen=True, eq=False)
class EnsembleLogits(Stage):
    """The logits of a teacher that is the mean of several rankers."""

    members: tuple[TableScores, ...]
    """Their logits of one table."""

    def run(self, context: StageContext) -> None:
        """Averages the probabilities; the logits are their logarithms."""
        tables = [read_scores(context.path(member)) for member in self.members]
        logits = np.stack([[t[name].to_numpy() for name in LOGIT_COLUMNS] for t in tables])
        logits -= np.logaddexp.reduce(logits, axis=1, keepdims=True)
        mean = np.logaddexp.reduce(logits, axis=0) - np.log(len(tables))
        columns = dict(zip(LOGIT_COLUMNS, mean.astype(np.float32)))
        table = pa.table({"candidate_id": tables[0]["candidate_id"], **columns})
        write_part(table, context.output / TABLE)


@dataclass(frozen=True, eq=False)
class TableEvaluation(Stage):
    """Measures of stored scores on a table, for each question."""

    scores: StoredScores
    measures: tuple[str, ...]
    ties: TieBreaking = "pessimistic"

    def run(self, context: StageContext) -> Outputs:
        """Evaluates, and writes a TREC run with the names of `quote_names`."""
        table, question_filter = self.scores.table, self.scores.question_filter
        rows = filtered_table(context.path(table), question_filter)
        scores = read_scores(context.path(self.scores))["score"].to_numpy()
        write_run(context.output / "ranking.run", quote_names(rows), scores)
        result = evaluate(
            rows, scores, self.measures, question_filter=question_filter, ties=self.ties
        )
        return save_evaluations({"": replace_fingerprint(result, context, table)}, context.output)


def replace_fingerprint(
    result: EvaluationResult, context: StageContext, table: Stage
) -> EvaluationResult:
    """Returns an evaluation with the fingerprint of the whole table, whichever rows were read."""
    return replace(result, fingerprint=str(context.outputs(table)["fingerprint"]))


def count_parameters(ranker: Path) -> int:
    """Returns the number of weights of a checkpoint, from the header of its file."""
    from safetensors import safe_open

    with safe_open(ranker / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def copy_ranker(source: Path, output: Path) -> None:
    """Copies a checkpoint into the folder of a stage, by hard links where possible."""
    shutil.copytree(source, output / RANKER, dirs_exist_ok=True, copy_function=hardlink_or_copy)


def _stored_shape(result: Result | None) -> RankerShape | None:
    """Returns the shape of the ranker of a complete stage, if the stage reported it."""
    values = result.outputs.get("shape") if result else None
    return (
        RankerShape(**{**values, "exit_layers": tuple(values["exit_layers"])}) if values else None
    )


def model_num_layers(path: str, max_length: int) -> int:
    """Returns the number of layers of a pretrained encoder, from its configuration.

    Args:
        path: A folder or a hub id.
        max_length: Number of tokens for which the encoder must have positions.

    Raises:
        CheckpointError: The path holds neither an encoder nor a ranker.
        ConfigError: The encoder has fewer positions.
    """
    from as2ray.experiments.cost_model import ENCODER_SHAPES

    if (name := path.partition("@")[0]) in ENCODER_SHAPES:
        return ENCODER_SHAPES[name].num_layers
    from as2ray.checkpoints.hub import check_hub

    hub_id, revision = split_revision(path)
    check_hub(hub_id, **revision)
    from as2ray.checkpoints.initialization import encoder_num_layers  # Loading it takes seconds.

    return encoder_num_layers(resolve_model_path(path), max_length)


def save_evaluations(results: Mapping[str, EvaluationResult], folder: Path) -> dict[str, Any]:
    """Stores evaluations: values by question as Parquet files, the rest in the manifest.

    Args:
        results: Evaluations by name.
        folder: Folder of the stage.

    Returns:
        Outputs of the stage, for `load_evaluation`.
    """
    entries = {}
    for number, (name, result) in enumerate(results.items()):
        pq.write_table(result.per_question, folder / f"questions-{number}.parquet")
        values = {**vars(result), "counts": asdict(result.counts), "number": number}
        entries[name] = {key: value for key, value in values.items() if key != "per_question"}
    return {"evaluations": entries}


def load_evaluation(result: Result, store: Store, name: str = "") -> EvaluationResult:
    """Reads an evaluation that `save_evaluations` stored."""
    values = dict(result.outputs["evaluations"][name])
    path = store.fetch(result) / f"questions-{values.pop('number')}.parquet"
    counts = TableCounts(**values.pop("counts"))
    return EvaluationResult(**values, counts=counts, per_question=pq.read_table(path))


def trained_rankers(
    recipe: Recipe,
    tables: Mapping[str, Stage],
    after: tuple[Stage, ...] = (),
    passages: Mapping[str, Stage] | None = None,
) -> dict[tuple[str, int], TrainedRanker]:
    """Returns the recipe's runs by name and seed, seed by seed, each after those it builds on.

    Args:
        recipe: Its runs.
        tables: Stages of its tables.
        after: Checks that must succeed before any run.
        passages: Stages of tables by passages, for runs that train joint models.

    Raises:
        ConfigError: A run trains a joint model and there are no `passages`, or its teacher is one.
    """
    _check_joint_runs(recipe, passages is not None)
    rankers: dict[tuple[str, int], TrainedRanker] = {}
    tests = recipe.tests if recipe.plot_learning_curves else []
    for seed, (name, run) in product(recipe.seeds, recipe.runs.items()):
        if seed not in recipe.seeds_of(name):
            continue
        run_tables = (passages or {}) if isinstance(run.loss, TwoInOneLoss) else tables
        train = tuple(run_tables[table] for table in run.train)
        weights = tuple(run.train_weights.get(table, 1.0) for table in run.train)
        rankers[name, seed] = TrainedRanker(
            model=replace(
                recipe.model,
                path=absolute_model_path(run.model or recipe.model.path),
                num_layers=run.num_layers,
                exit_layers=run.exit_layers,
                num_ranking_heads=run.num_ranking_heads,
                pooling=run.pooling or recipe.model.pooling,
            ),
            train=train,
            dev=run_tables[run.dev or recipe.dev],
            training=replace(run.training, seed=run.training.seed + seed),
            loss=run.loss,
            train_weights=weights if run.train_weights else (),
            init_from=rankers[run.init_from, seed] if run.init_from else None,
            teacher_logits=tuple(
                tuple(
                    TableScores(rankers[each, seed], table, "logits")
                    if isinstance(each, str)
                    else EnsembleLogits(
                        tuple(TableScores(rankers[name, seed], table, "logits") for name in each)
                    )
                    for table in train
                )
                for each in run.teachers
            ),
            watched={test: run_tables[test] for test in tests},
            tracking=recipe.tracking,
            after=after,
        )
    return rankers


def absolute_model_path(path: str) -> str:
    """Returns the absolute path of a local model folder, and any other name unchanged."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def evaluation(recipe: Recipe, ranker: Stage, table: Stage) -> TableEvaluation:
    """Returns the stage that measures a ranker on a table as the recipe says."""
    scores = TableScores(ranker, table, question_filter=recipe.question_filter)
    return TableEvaluation(scores, tuple(recipe.measures), recipe.ties)


def _check_joint_runs(recipe: Recipe, has_passages: bool) -> None:
    joint = [name for name, run in recipe.runs.items() if isinstance(run.loss, TwoInOneLoss)]
    if joint and not has_passages:
        problem = f"run {joint[0]!r} trains a joint model, which only `pipelines.two_in_one` does"
        raise ConfigError(problem)
    for name, run in recipe.runs.items():
        if teachers := sorted({*joint} & {*run.teaching_runs}):
            raise ConfigError(
                f"run {name!r} has the joint models {teachers} as teachers; teachers must rank "
                "candidates one by one"
            )
