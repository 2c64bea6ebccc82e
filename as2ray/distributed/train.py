"""Training under Ray Train: the same job, on any number of workers.

Knows Ray Train. Must hold no training logic: a worker calls `training.train.train`, and
loads it only then: the controller, and a trial that starts a run, need no models.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
)
from ray.train.torch import TorchTrainer

from as2ray.distributed.cluster import WORKER_ENVIRONMENT, check_shared
from as2ray.distributed.ingest import RayBatchSource
from as2ray.distributed.plan import WorkersConfig, check_plan
from as2ray.tables.parquet import ParquetTable
from as2ray.training.checkpoint_store import Metrics
from as2ray.training.job import TrainingJob


def train_on_ray(
    job: TrainingJob,
    folder: str | Path,
    workers: WorkersConfig,
    callbacks: Sequence[UserCallback] = (),
) -> Path:
    """Trains a job; goes on where an earlier, interrupted try in the same folder stopped.

    Args:
        job: What to do.
        folder: Of this run alone; trackers write here, and checkpoints where
            `workers.storage` says, or here.
        workers: What to take of the cluster; `count=0` trains in this process.
        callbacks: Of Ray Train, told of every report; not where this process trains.

    Returns:
        Folder of the ranker that was selected.
    """
    folder = Path(folder).resolve()
    if workers.num_workers == 0:
        from as2ray.training.run_job import train

        return train(job, folder)
    check_plan(workers)
    storage = Path(workers.storage_path).resolve() if workers.storage_path else folder.parent
    check_shared(ParquetTable.open([*job.train_tables, *job.eval_tables.values()]).paths, storage)
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={"job": job, "folder": str(folder), "workers": asdict(workers)},
        scaling_config=ScalingConfig(
            num_workers=(workers.min_workers, workers.num_workers)
            if workers.min_workers
            else workers.num_workers,
            elastic_resize_monitor_interval_s=workers.elastic_resize_interval_s,
            use_gpu=workers.gpus_per_worker > 0,
            resources_per_worker={"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker},
        ),
        run_config=RunConfig(
            name=run_name(folder, storage),
            storage_path=str(storage),
            worker_runtime_env={"env_vars": WORKER_ENVIRONMENT},
            failure_config=FailureConfig(max_failures=workers.max_failures),
            callbacks=list(callbacks),
            checkpoint_config=CheckpointConfig(
                num_to_keep=1,
                checkpoint_score_attribute=job.training.select_by,
                checkpoint_score_order="max",
            ),
        ),
    )
    best = trainer.fit().get_best_checkpoint(job.training.select_by, "max")
    return Path(best.path) / "ranker"


def run_name(folder: Path, storage: Path) -> str:
    """A run's name, by which Ray finds its checkpoints again, whoever wrote them.

    On a storage that runs share it is one that no other has, kept in the run's folder for a later
    try there.

    Args:
        folder: Of the run alone.
        storage: Where the folder of that name with its checkpoints lies.
    """
    if storage == folder.parent:
        return folder.name
    kept = folder / "name"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        part.write_text(f"{folder.parent.name.removesuffix('.part')}-{uuid4().hex[:8]}")
        part.rename(kept)
    return kept.read_text()


def _train_worker(config: dict[str, Any]) -> None:
    from as2ray.training.run_job import run_job

    job, workers = config["job"], WorkersConfig(**config["workers"])
    context = ray.train.get_context()
    # Ray holds a worker to its share of CPUs; on a node of our own all cores are ours to use.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // context.get_local_world_size()))
    run_job(
        job,
        config["folder"],
        _RayTrainCheckpointStore(),
        lambda stream: RayBatchSource(stream, workers.num_data_cpus / workers.num_workers),
    )


@contextmanager
def open_checkpoint(checkpoint: Checkpoint | None) -> Iterator[Path | None]:
    """A checkpoint of Ray's as a folder, which is gone afterwards where it had to be copied."""
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield Path(folder)


class _RayTrainCheckpointStore:
    """Reports to Ray Train, which keeps the best and the last checkpoint."""

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """The last checkpoint, on this machine as long as it is read."""
        return open_checkpoint(ray.train.get_checkpoint())

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """Hands metrics and checkpoint over; a barrier for all workers."""
        handed = Checkpoint.from_directory(str(checkpoint)) if checkpoint else None
        ray.train.report(dict(metrics), checkpoint=handed)
        if checkpoint is not None:
            shutil.rmtree(checkpoint, ignore_errors=True)
