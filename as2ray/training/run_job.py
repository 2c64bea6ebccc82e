"""Runs a training job: loads its model and tables, and trains."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from as2ray.checkpoints.initialization import init_ranker
from as2ray.data.list_reader import ListReader
from as2ray.data.packed_dataset import ExampleReader, PackedDataset
from as2ray.data.pair_reader import PairReader
from as2ray.data.passage_reader import PassageReader
from as2ray.errors import StaleStageError
from as2ray.losses import get_loss, source_digest
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.models.ranker import Ranker
from as2ray.tables.atomic import atomic_file
from as2ray.tables.parquet import ParquetTable, list_parquet_files
from as2ray.tables.source_files import hash_files, model_files
from as2ray.text.tokenization import TOKENIZER_SETTINGS
from as2ray.training import parallel
from as2ray.training.checkpoint_store import BEST, CheckpointStore, LocalCheckpointStore
from as2ray.training.job import TrainingJob
from as2ray.training.tracking import flatten
from as2ray.training.trainer import RANKER, BatchSource, Trainer
from as2ray.training.validation import EvalSet, PassageEvalSet

log = logging.getLogger(__name__)

LOGGED_SETTINGS = (
    *("model", "train_tables", "train_weights", "eval_tables", "training", "loss"),
    "teacher_logits",
)
"""Fields of a job that trackers show as its parameters."""

JOB = "job.json"
"""File in a run's folder with the settings of its job, and the hashes of what it reads."""

CONTENT = "content."
"""Start of the keys of these hashes."""


def run_job(
    job: TrainingJob,
    folder: str | Path,
    checkpoint_store: CheckpointStore,
    create_batch_source: Callable[[PackedDataset], BatchSource] = lambda dataset: dataset,
) -> bool:
    """Trains in this process, which may be one of several in a process group.

    Args:
        job: The model, the tables and the settings.
        folder: Folder of the trackers' files.
        checkpoint_store: Where the run is saved to and resumed from.
        create_batch_source: Wraps the data set in another source of the same packed batches.

    Returns:
        Whether the run is complete. It is not if it stopped because it is about to lose a node.
    """
    if (checkpoint_store.folder / BEST).exists():
        return True
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    )
    settings = asdict(job)
    model = dict(settings["model"])
    names = [name for name in TOKENIZER_SETTINGS if name in model and name != "max_length"]
    ranker = init_ranker(
        tokenizer_settings={name: model.pop(name) for name in names},
        **model,
        is_joint=job.is_joint,
        extract_answers=job.extract_answers,
        seed=job.training.seed,
    ).to(device)
    trainer = Trainer(
        ranker,
        get_loss(job.loss),
        create_batch_source(_create_dataset(job, ranker)),
        job.training,
        checkpoint_store,
        {name: _create_eval_set(job, path, ranker) for name, path in job.eval_tables.items()},
        folder,
        job.tracking,
        replace(job.run, params=flatten({name: settings[name] for name in LOGGED_SETTINGS})),
    )
    return trainer.fit().has_ended


def train(job: TrainingJob, folder: str | Path, resume_interval_s: float = 600.0) -> Path:
    """Trains in this process only, without Ray.

    Args:
        job: The model, the tables and the settings.
        folder: Folder of checkpoints and trackers; a run that was interrupted there is resumed.
        resume_interval_s: Seconds between two states from which it can be resumed.

    Returns:
        Folder of the ranker that was selected.

    Raises:
        StaleStageError: The folder holds a run of another job, or tables or the start model have
            changed; names what differs.
    """
    _check_same_job(job, Path(folder))
    run_job(job, folder, LocalCheckpointStore(folder, resume_interval_s))
    return Path(folder) / BEST / RANKER


def _check_same_job(job: TrainingJob, folder: Path) -> None:
    """Checks that a run in the folder is of this job; notes the job of a new run.

    Inputs that are gone are not compared, nor those of runs of versions that stored no hashes.
    Inputs with equal hashes are equal wherever they are: a store may be moved.
    """
    settings = {k: v for k, v in asdict(job).items() if k not in ("tracking", "run")}
    current, path = json.loads(json.dumps(flatten(settings), default=str)), folder / JOB
    current |= {CONTENT + name: content for name, content in _hash_inputs(job).items()}
    stored = json.loads(path.read_text()) if path.is_file() else current
    for one, other in ((stored, current), (current, stored)):
        one |= {k: v for k, v in other.items() if k.startswith(CONTENT) and k not in one}
    keys = [
        key
        for key in sorted({*stored, *current})
        if stored.get(key) != current.get(key)
        and _by_content(stored.get(key), stored) != _by_content(current.get(key), current)
    ]
    if keys:
        changes = [f"{key}: {stored.get(key)!r} -> {current.get(key)!r}" for key in keys[:8]]
        problem = f"{folder} holds a run of another job (run -> job): {'; '.join(changes)}"
        raise StaleStageError(problem, fix="choose another folder, or remove this one")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(current, indent=2) + "\n")


def _by_content(value: Any, job: Mapping[str, Any]) -> Any:
    """Returns a setting with the hashes of the inputs that a job has hashes of, not their paths."""
    if isinstance(value, list):
        return [_by_content(each, job) for each in value]
    return job.get(f"{CONTENT}{value}", value)


def _hash_inputs(job: TrainingJob) -> dict[str, str]:
    """Returns a hash of each local folder that a job reads, and of the text of its own loss."""
    folders = (*job.train_tables, *job.eval_tables.values(), *chain(*job.teacher_logits))
    files = {folder: list_parquet_files(Path(folder)) for folder in folders}
    files[job.model.path] = list(model_files(job.model.path).values())
    hashes = {
        path: hash_files(paths) for path, paths in files.items() if any(map(Path.exists, paths))
    }
    if isinstance(job.loss, str) and ":" in job.loss:
        hashes[job.loss] = source_digest(job.loss)
    return hashes


def _create_eval_set(job: TrainingJob, path: str, ranker: Ranker) -> EvalSet | PassageEvalSet:
    table, max_batch_tokens = ParquetTable.open(path).to_table(), job.training.max_batch_tokens
    if isinstance(job.loss, TwoInOneLoss):
        return PassageEvalSet.from_table(table, ranker, max_batch_tokens, job.loss)
    return EvalSet.from_table(table, ranker, max_batch_tokens)


def _create_dataset(job: TrainingJob, ranker: Ranker) -> PackedDataset:
    training = job.training
    dataset = PackedDataset(
        _create_reader(job, ranker),
        training.global_batch_size,
        training.max_batch_tokens,
        training.seed,
        parallel.get_rank(),
        parallel.get_world_size(),
        num_shards=training.num_data_shards,
    )
    if training.global_batch_tokens is None:
        if training.global_batch_size > dataset.reader.num_examples:
            log.warning(
                "global_batch_size %d is larger than the %d examples of the table: an epoch is a "
                "single step",
                training.global_batch_size,
                dataset.reader.num_examples,
            )
        return dataset
    num_examples = training.global_batch_tokens / dataset.mean_length()
    return replace(dataset, global_batch_size=max(1, round(num_examples)))


def _create_reader(job: TrainingJob, ranker: Ranker) -> ExampleReader:
    """Returns a reader of the examples that the loss needs: passages, lists or pairs."""
    files = ParquetTable.open(job.train_tables)
    if job.is_joint:
        return PassageReader(files, ranker.tokenizer)
    teachers = tuple(ParquetTable.open(folders) for folders in job.teacher_logits)
    sizes = [len(ParquetTable.open(path)) for path in job.train_tables if job.train_weights]
    weights = tuple(zip(sizes, job.train_weights))
    pairs = PairReader(files, ranker.tokenizer, teachers=teachers, weights=weights)
    loss = get_loss(job.loss)
    if isinstance(loss, ListwiseLoss | MarginRankingLoss):
        return ListReader(pairs, loss.list_size)
    return pairs
