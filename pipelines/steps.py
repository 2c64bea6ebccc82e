"""Stages that pipelines share: prepared tables, trained rankers, teacher logits, evaluations."""

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
from as2ray.checkpoints.initialization import check_model_spec, encoder_num_layers
from as2ray.checkpoints.loading import load
from as2ray.corpora.corpus import HUB
from as2ray.corpora.page_grades import PageOptions
from as2ray.corpora.preparation import prepare_splits, release_path
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.sampling import flip_labels, sample_questions
from as2ray.distributed.score import store_logits
from as2ray.distributed.train import train_on_ray
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import StaleStageError
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.experiments.stage import digest, manifest, stage
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
    """Makes a stage with a table as Parquet files.

    Args:
        folder: Folder of the stage.
        data: The table.
        data_dir: Folder of the raw release, or `hub`; by default its folder in AS2RAY_DATA.
        without: Stages of tables whose questions are left out.

    Raises:
        StaleStageError: The stage exists, and was made of another table or another release.
    """
    others, file_sizes = without or {}, _file_sizes(data, data_dir)
    options = get_corpus(data.corpus).parse_options(data.corpus_options)
    splitter = options.sentence_splitter if isinstance(options, PageOptions) else None
    inputs = {
        "data": data,
        "splitter": versioned_name(splitter) if splitter else None,
        "without": {name: digest(path) for name, path in others.items()},
    }

    def make(part: Path) -> Mapping[str, Any]:
        shutil.rmtree(part / "release", ignore_errors=True)
        release = prepare_splits(
            data.corpus,
            data_dir,
            part / "release",
            {data.split: data.question_filter},
            held_out_tables=[table(path) for path in others.values()],
            **data.corpus_options,
        )
        for path in sorted((part / "release" / data.split).glob("*.parquet")):
            path.rename(part / path.name)
        shutil.rmtree(part / "release")
        entry = release["splits"][data.split]
        return {**entry, **_sample_and_flip(part, data), "source": file_sizes}

    stage(folder, inputs, make)
    stored_sizes = manifest(folder)["outputs"].get("source", {})
    if stored_sizes and file_sizes and stored_sizes != file_sizes:
        raise StaleStageError(
            f"{folder} was made of {stored_sizes} (bytes), and the release now is {file_sizes}",
            fix="choose another --output, or remove this stage and those built on it",
        )
    return folder.resolve()


def _file_sizes(data: TableSpec, data_dir: str | None) -> dict[str, int]:
    """Returns the size of the split's file in bytes, by its name; {} without such a file."""
    corpus = get_corpus(data.corpus)
    source, names = release_path(corpus, data_dir), corpus.files.get(data.split, ())
    path = None if source == HUB else find_file(Path(source), names)
    return {path.name: path.stat().st_size} if path else {}


def _sample_and_flip(part: Path, data: TableSpec) -> Mapping[str, Any]:
    """Samples questions and flips labels; returns the changed entries of the manifest."""
    if not (data.label_noise or data.num_questions is not None or data.max_negatives is not None):
        return {}
    changed = sample_questions(table(part), data.num_questions, data.max_negatives, data.seed)
    changed = flip_labels(changed, data.label_noise, data.seed) if data.label_noise else changed
    for path in part.glob("*.parquet"):
        path.unlink()
    pq.write_table(changed, part / TABLE, row_group_size=4_096, compression="zstd")
    return {"counts": asdict(count_table(changed)), "fingerprint": fingerprint(changed), "parts": 1}


def table(folder: Path) -> pa.Table:
    """Reads the table of a stage."""
    return ParquetTable.open(folder).to_table()


def check_model(model: ModelSpec) -> None:
    """Checks that a model to start from has the layers and exits of its spec; reads no weights.

    Raises:
        CheckpointError: It is neither an encoder nor a ranker.
        ConfigError: It does not have these layers or exits.
    """
    check_model_spec(model, encoder_num_layers(packaged.resolve_model_path(model.path)))


@dataclass(frozen=True)
class Plan:
    """A training job and the stages that it is made from."""

    job: TrainingJob
    """The job. The path of its model may be `packaged:NAME`; `start` replaces it."""
    tables: Mapping[str, Path]
    """Stages of the tables that it reads, by name."""
    start: Path | None = None
    """Stage of the ranker that it starts from."""
    teachers: tuple[Path, ...] = ()
    """Stages of its teachers."""

    def resolved(self) -> TrainingJob:
        """Returns the job with a folder or hub id to start from."""
        model = self.job.model
        path = str(self.start / "ranker") if self.start else packaged.resolve_model_path(model.path)
        return replace(self.job, model=replace(model, path=path))

    def inputs(self) -> dict[str, Any]:
        """Returns everything that changes the result."""
        path = digest(self.start) if self.start else self.job.model.path
        outputs = {name: manifest(stage)["outputs"] for name, stage in self.tables.items()}
        return {
            "model": {**asdict(self.job.model), "path": path},
            "loss": self.job.loss,
            "training": self.job.training,
            "tables": {name: output["fingerprint"] for name, output in outputs.items()},
            "teachers": [digest(teacher) for teacher in self.teachers],
        }


def train_ranker(folder: Path, plan: Plan, workers: WorkersConfig) -> Path:
    """Makes a stage with the best ranker of a run, its metrics and TensorBoard files.

    Args:
        folder: Folder of the stage.
        plan: The training job and its inputs.
        workers: Part of the cluster to use.
    """

    def make(part: Path) -> Mapping[str, Any]:
        run, done = part / "run", part / "done"
        # Results are copied before the run is removed, which a single rename marks: after an
        # interruption, training resumes from the complete run or is not repeated.
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
                shutil.rmtree(best.parents[1], ignore_errors=True)  # its files are copied
        if done.exists():
            shutil.rmtree(done)
        return {"workers": workers}

    return stage(folder, plan.inputs(), make)


def store_teacher_logits(folder: Path, table: Path, teacher: Path, workers: WorkersConfig) -> Path:
    """Makes a stage with a teacher's logits of every pair of a table.

    Args:
        folder: Folder of the stage.
        table: Stage of the table.
        teacher: Stage of the trained ranker.
        workers: Part of the cluster to use.
    """
    inputs = {"teacher": digest(teacher), "table": manifest(table)["outputs"]["fingerprint"]}

    def make(part: Path) -> Mapping[str, Any]:
        summary = store_logits(table, teacher / "ranker", part, workers)
        log.info(
            "%s: %s pairs in %.0f s, %s bytes",
            folder.name,
            summary.num_scored,
            summary.duration_s,
            summary.num_bytes,
        )
        return {"rate": summary}

    return stage(folder, inputs, make)


def evaluate_ranker(
    folder: Path,
    ranker: Path,
    tests: Mapping[str, Path],
    measures: Sequence[str],
    question_filter: QuestionFilter,
) -> dict[str, EvaluationResult]:
    """Makes a stage with a TREC run and the measures of each test table.

    Args:
        folder: Folder of the stage.
        ranker: Stage of the trained ranker.
        tests: Stages of the tables, by name.
        measures: Names of ir-measures.
        question_filter: Questions to evaluate.

    Returns:
        Results by table.
    """
    inputs = {
        "ranker": digest(ranker),
        "tests": {name: manifest(path)["outputs"]["fingerprint"] for name, path in tests.items()},
        "measures": list(measures),
        "question_filter": question_filter,
    }

    def make(part: Path) -> None:
        loaded = load(ranker / "ranker")
        for name, path in tests.items():
            rows = table(path)
            scores = loaded.predict_table(rows).sort_keys
            write_run(part / f"{name}.run", rows, scores, tag=ranker.name)
            result = evaluate(rows, scores, measures, question_filter=question_filter)
            (part / f"{name}.json").write_text(json.dumps(result.measures, indent=2) + "\n")

    stage(folder, inputs, make)
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
