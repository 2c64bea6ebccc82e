"""Runs training jobs on any number of workers with Ray Train.

Only a worker imports `training.run_job`, and with it transformers: the controller, and a trial that
starts a run, do not need them.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
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

from as2ray.distributed.cluster import WORKER_ENVIRONMENT, check_shared, set_start_timeout
from as2ray.distributed.ingest import RayBatchSource
from as2ray.distributed.plan import check_plan
from as2ray.distributed.workers_config import WorkersConfig, bundle_resources
from as2ray.tables.atomic import atomic_file
from as2ray.tables.parquet import ParquetTable
from as2ray.training.checkpoint_store import Metrics
from as2ray.training.job import TrainingJob


def train_on_ray(
    job: TrainingJob,
    folder: str | Path,
    workers: WorkersConfig,
    callbacks: Sequence[UserCallback] = (),
) -> Path:
    """Trains a job; resumes a run that was interrupted in the same folder.

    Args:
        job: The model, the tables and the settings.
        folder: Folder of this run only, for the files of trackers; checkpoints go to
            `workers.storage_path`, or by default to a folder of this run's name beside it.
        workers: Resources to use; with `num_workers=0` this process trains, without Ray.
        callbacks: Callbacks of Ray Train, called with every report; unused if this process trains.

    Returns:
        Folder of the ranker that was selected.
    """
    folder = Path(folder).resolve()
    if workers.num_workers == 0:
        from as2ray.training.run_job import train

        return train(job, folder)
    check_plan(workers)
    storage = Path(workers.storage_path).resolve() if workers.storage_path else folder.parent
    tables = ParquetTable.open([*job.train_tables, *job.eval_tables.values()])
    check_shared([*tables.paths, *chain.from_iterable(job.teacher_logits), job.model.path], storage)
    set_start_timeout(is_elastic=workers.min_workers is not None)
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={"job": job, "folder": str(folder), "workers": workers},
        scaling_config=ScalingConfig(
            num_workers=(workers.min_workers, workers.num_workers)
            if workers.min_workers
            else workers.num_workers,
            elastic_resize_monitor_interval_s=workers.elastic_resize_interval_s,
            use_gpu=workers.gpus_per_worker > 0,
            resources_per_worker=bundle_resources(workers),
            label_selector=workers.label_selector or None,
            placement_strategy=workers.placement_strategy,
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
    """Returns the name by which Ray finds the checkpoints of a run again.

    Runs that share a storage get unique names. A unique name is stored in the run's folder, so that
    the run can be resumed.

    Args:
        folder: Folder of this run only.
        storage: Folder that contains, under the run's name, its checkpoints.
    """
    if storage == folder.parent:
        return folder.name
    path = folder / "name"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            stage = folder.parent.name.removesuffix(".part")
            temporary.write_text(f"{stage}-{uuid4().hex[:8]}")
    return path.read_text()


def _train_worker(config: dict[str, Any]) -> None:
    from as2ray.training.run_job import run_job

    workers: WorkersConfig = config["workers"]
    context = ray.train.get_context()
    # Ray sets OMP_NUM_THREADS to the CPUs of a worker; the workers may use all cores of the node.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // context.get_local_world_size()))
    run_job(
        config["job"],
        config["folder"],
        _RayTrainCheckpointStore(),
        lambda dataset: RayBatchSource(dataset, workers.num_data_cpus / workers.num_workers),
    )


@contextmanager
def open_checkpoint(checkpoint: Checkpoint | None) -> Iterator[Path | None]:
    """Yields a Ray checkpoint as a folder; a copy that had to be made is removed afterwards."""
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield Path(folder)


class _RayTrainCheckpointStore:
    """Reports checkpoints to Ray Train, which keeps the best and the last."""

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """See `CheckpointStore`."""
        return open_checkpoint(ray.train.get_checkpoint())

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """See `CheckpointStore`; all workers wait for each other."""
        ray_checkpoint = Checkpoint.from_directory(str(checkpoint)) if checkpoint else None
        ray.train.report(dict(metrics), checkpoint=ray_checkpoint)
        if checkpoint is not None:
            shutil.rmtree(checkpoint, ignore_errors=True)
