"""The stages that pipelines share: a prepared table, a trained ranker, an evaluated ranker.

Knows stages, corpora, training and evaluation. Must not know any one pipeline.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.checkpoints import packaged
from as2ray.checkpoints.initialization import encoder_num_layers
from as2ray.checkpoints.loading import load
from as2ray.corpora.corpus import HUB
from as2ray.corpora.preparation import prepare_splits, release_path
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.sampling import flip_labels, sample_questions
from as2ray.distributed.plan import WorkersConfig
from as2ray.distributed.score import store_logits
from as2ray.distributed.train import train_on_ray
from as2ray.errors import ConfigError, StaleStageError
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.experiments.stage import digest, manifest, stage
from as2ray.models.multi_stage import check_exit_layers
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import find_file
from as2ray.tables.schema import count_table
from as2ray.tables.trec import align_run, read_run, write_run
from as2ray.text.sentences import versioned_name
from as2ray.training.checkpoint_store import hardlink_or_copy
from as2ray.training.job import ModelSpec, TrainingJob
from pipelines.recipe import TableSpec

log = logging.getLogger(__name__)

TABLE = "part-00000.parquet"


def prepare_table(
    folder: Path,
    data: TableSpec,
    data_dir: str | None = None,
    without: Mapping[str, Path] | None = None,
) -> Path:
    """A stage that holds a table as Parquet files.

    Args:
        folder: The stage.
        data: What to prepare.
        source: Folder of the raw release, or `hub`; by default the corpus' place in AS2RAY_DATA.
        without: Stages whose questions are left out.

    Raises:
        StageMismatchError: The stage is there, of other data or of another release.
    """
    others, now = without or {}, _sizes(data, data_dir)
    splitter = get_corpus(data.corpus).resolve(data.corpus_options).get("splitter")
    identity = {
        "data": data,
        "splitter": versioned_name(splitter) if splitter else None,
        "without": {name: digest(path) for name, path in others.items()},
    }

    def make(part: Path) -> Mapping[str, Any]:
        shutil.rmtree(part / "release", ignore_errors=True)
        found = prepare_splits(
            data.corpus,
            data_dir,
            part / "release",
            {data.split: data.question_filter},
            held_out_tables=[table(path) for path in others.values()],
            **data.corpus_options,
        )
        release = part / "release" / data.split
        for path in sorted(release.glob("*.parquet")):
            path.rename(part / path.name)
        shutil.rmtree(part / "release")
        entry = found["splits"][data.split]
        return {**entry, **_changed(part, data), "source": now}

    made = stage(folder, identity, make)
    before = manifest(made)["found"].get("source", {})
    if before and now and before != now:
        raise StaleStageError(
            f"{made} was made of {before}, and there is {now} (bytes)"
            "; expected the same release under the same name",
            fix="choose another --output, or remove this stage and those built on it",
        )
    return made


def _sizes(data: TableSpec, data_dir: str | None) -> dict[str, int]:
    """The release's file of a split in bytes; nothing where it is not there, or no file."""
    corpus = get_corpus(data.corpus)
    where, names = release_path(corpus, data_dir), corpus.files.get(data.split, ())
    path = None if where == HUB else find_file(Path(where), names)
    return {path.name: path.stat().st_size} if path else {}


def _changed(part: Path, data: TableSpec) -> Mapping[str, Any]:
    """Draws and turns labels over; what that changes in the manifest."""
    if not (data.label_noise or data.num_questions is not None or data.max_negatives is not None):
        return {}
    changed = sample_questions(table(part), data.num_questions, data.max_negatives, data.seed)
    changed = flip_labels(changed, data.label_noise, data.seed) if data.label_noise else changed
    for path in part.glob("*.parquet"):
        path.unlink()
    pq.write_table(changed, part / TABLE, row_group_size=4_096, compression="zstd")
    return {"counts": asdict(count_table(changed)), "fingerprint": fingerprint(changed), "parts": 1}


def table(folder: Path) -> pa.Table:
    """The table of a prepared stage."""
    return ParquetTable.open(folder).to_table()


def refuse_unfit(model: ModelSpec) -> None:
    """Looks at a model to start from before anything is made for it; its weights are not read.

    Args:
        model: With its layers and exits.

    Raises:
        CheckpointError: No encoder or ranker.
        RecipeError: Layers or exits that it does not have.
    """
    depth = encoder_num_layers(packaged.resolve_model_path(model.path))
    layers = depth if model.num_layers is None else model.num_layers
    if not 1 <= layers <= depth:
        raise ConfigError(
            f"{layers} layers of an encoder that has {depth}; expected 1 to {depth} layers",
            fix="correct `model.layers`",
        )
    if model.exit_layers is not None:
        check_exit_layers(model.exit_layers, layers)


@dataclass(frozen=True)
class Plan:
    """A training run and the stages that it is made from."""

    job: TrainingJob
    """The run; its model path may be `packaged:NAME`, and counts only where there is no `start`."""
    tables: Mapping[str, Path]
    """Stages of the tables it reads, by name."""
    start: Path | None = None
    """Stage of the ranker it starts from."""
    teachers: tuple[Path, ...] = ()
    """Stages of the rankers whose stored logits it learns from."""

    def resolved(self) -> TrainingJob:
        """The run with a folder or hub id to start from."""
        model = self.job.model
        path = str(self.start / "ranker") if self.start else packaged.resolve_model_path(model.path)
        return replace(self.job, model=replace(model, path=path))

    def identity(self) -> dict[str, Any]:
        """What changes its result."""
        path = digest(self.start) if self.start else self.job.model.path
        made = {name: manifest(stage)["found"] for name, stage in self.tables.items()}
        return {
            "model": {**asdict(self.job.model), "path": path},
            "objective": self.job.loss,
            "training": self.job.training,
            "tables": {name: found["fingerprint"] for name, found in made.items()},
            "teachers": [digest(teacher) for teacher in self.teachers],
        }


def train_ranker(folder: Path, plan: Plan, workers: WorkersConfig) -> Path:
    """A stage that holds the best ranker of a run, its metrics and TensorBoard files.

    Args:
        folder: The stage.
        plan: The run.
        workers: What to take of the cluster.
    """

    def make(part: Path) -> Mapping[str, Any]:
        run, done = part / "run", part / "done"
        # All is taken out of the run before it goes, in one step: a try that is interrupted goes
        # on from the whole run, or trains no more.
        if run.exists() or not (part / "ranker").exists():
            best = train_on_ray(plan.resolved(), run, workers)
            shutil.copytree(
                best, part / "ranker", dirs_exist_ok=True, copy_function=hardlink_or_copy
            )
            if (run / "metrics.jsonl").exists():
                shutil.copy(run / "metrics.jsonl", part)
            if (run / "tensorboard").exists():
                shutil.copytree(run / "tensorboard", part / "tensorboard", dirs_exist_ok=True)
            if run.exists():
                run.rename(done)
            if workers.num_workers and workers.storage_path:
                shutil.rmtree(best.parents[1], ignore_errors=True)  # the run's, and copied
        if done.exists():
            shutil.rmtree(done)
        return {"workers": workers}

    return stage(folder, plan.identity(), make)


def store_teacher_logits(folder: Path, table: Path, teacher: Path, workers: WorkersConfig) -> Path:
    """A stage with a ranker's logits of every pair of a table.

    Args:
        folder: The stage.
        table: Stage of the table.
        teacher: Stage of the trained ranker.
        workers: What to take of the cluster.
    """
    identity = {"teacher": digest(teacher), "table": manifest(table)["found"]["fingerprint"]}

    def make(part: Path) -> Mapping[str, Any]:
        rate = store_logits(table, teacher / "ranker", part, workers)
        log.info(
            "%s: %s pairs in %.0f s, %s bytes",
            folder.name,
            rate.num_scored,
            rate.duration_s,
            rate.num_bytes,
        )
        return {"rate": rate}

    return stage(folder, identity, make)


def evaluate_ranker(
    folder: Path,
    ranker: Path,
    tests: Mapping[str, Path],
    measures: Sequence[str],
    question_filter: QuestionFilter,
) -> dict[str, EvaluationResult]:
    """A stage with a TREC run and the measures of each test table; the evaluations by table.

    Args:
        folder: The stage.
        ranker: Stage of the trained ranker.
        tests: Stages of the tables, by name.
        measures: Names of ir-measures.
        filter: Questions that count.
    """
    identity = {
        "ranker": digest(ranker),
        "tests": {name: manifest(path)["found"]["fingerprint"] for name, path in tests.items()},
        "measures": list(measures),
        "filter": question_filter,
    }

    def make(part: Path) -> None:
        loaded = load(ranker / "ranker")
        for name, path in tests.items():
            rows = table(path)
            scores = loaded.predict_table(rows).sort_keys
            write_run(part / f"{name}.run", rows, scores, tag=ranker.name)
            found = evaluate(rows, scores, measures, question_filter=question_filter)
            (part / f"{name}.json").write_text(json.dumps(found.measures, indent=2) + "\n")

    stage(folder, identity, make)
    return {
        name: _evaluation(folder, name, path, measures, question_filter)
        for name, path in tests.items()
    }


def _evaluation(
    folder: Path, name: str, path: Path, measures: Sequence[str], question_filter: QuestionFilter
) -> EvaluationResult:
    rows = table(path)
    scores = align_run(read_run(folder / f"{name}.run"), rows)
    return evaluate(rows, scores, measures, question_filter=question_filter)
