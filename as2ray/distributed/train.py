"""Runs training jobs on any number of workers with Ray Train.

Only a worker imports `training.run_job`, and with it transformers: the controller, and a trial that
starts a run, do not need them.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray.train
import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
)
from ray.train.torch import TorchTrainer

from as2ray.console.configuration import log_to_console
from as2ray.distributed.cluster import (
    check_shared,
    record_placement_group,
    set_start_timeout,
    worker_environment,
)
from as2ray.distributed.ingest import RayBatchSource
from as2ray.distributed.node_files import NodeFiles
from as2ray.distributed.plan import check_plan, reserve_data_cpus
from as2ray.distributed.workers_config import WorkersConfig, bundle_resources
from as2ray.errors import DivergedError
from as2ray.tables.atomic import atomic_file, atomic_folder
from as2ray.training.checkpoint_store import BEST, Metrics
from as2ray.training.job import EncoderJob, TrainingJob
from as2ray.training.tracking import METRICS, stage_name


def train_on_ray(
    job: TrainingJob,
    folder: str | Path,
    workers: WorkersConfig,
    callbacks: Sequence[UserCallback] = (),
    node_files: NodeFiles = NodeFiles(),  # noqa: B008
) -> Path:
    """Trains a job; resumes a run that was interrupted in the same folder.

    Args:
        job: The model, the tables and the settings.
        folder: Folder of this run only, for the selected ranker and the files of trackers. Before
            the run is complete, checkpoints are in `workers.storage_path`, or by default here.
        workers: Resources to use; with `num_workers=0` this process trains, without Ray.
        callbacks: Callbacks of Ray Train, called with the metrics of every evaluation, and with
            none for every resume state; unused if this process trains.
        node_files: How nodes see files of others. If they publish them, each worker fetches what it
            reads, and rank 0 publishes the run's folder with every resume state and at the end.

    Returns:
        Folder of the ranker that was selected.
    """
    folder = Path(folder).resolve()
    if workers.num_workers == 0:
        from as2ray.training.run_job import train

        return train(job, folder, workers.resume_interval_s)
    selected = folder / BEST
    node_files.restore(selected)
    is_mounted = workers.storage_path and node_files.is_local
    storage = Path(workers.storage_path or "").resolve() if is_mounted else folder.parent
    run_folder = storage / run_name(folder, storage)
    if selected.exists():
        if run_folder != folder:  # An attempt that was killed at its end has left its checkpoints.
            shutil.rmtree(run_folder, ignore_errors=True)
        return selected / "ranker"
    check_plan(workers)
    check_shared(list_inputs(job), storage, node_files)
    set_start_timeout(is_elastic=workers.min_workers is not None)
    store = _RayTrainCheckpointStore(
        run_folder,
        workers.resume_interval_s,
        workers.preemption_check_steps,
        bool(callbacks),
        node_files,
        # What trackers write outside of the run's folder.
        [Path(job.run.folder) / name for name in ("tensorboard", "wandb") if job.run.folder],
    )
    loop_config = {"job": job, "folder": str(folder), "workers": workers, "store": store}
    storage_path, filesystem = node_files.train_storage(storage)
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config=loop_config,
        scaling_config=_scaling_config(workers),
        run_config=RunConfig(
            # Its log is in the files of the session.
            logging_config=LoggingConfig("WARNING"),
            name=run_folder.name,
            storage_path=storage_path,
            storage_filesystem=filesystem,
            worker_runtime_env={"env_vars": worker_environment()},
            failure_config=FailureConfig(max_failures=workers.max_failures),
            callbacks=list(callbacks),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    with reserve_data_cpus(workers, str(folder)) as loop_config["data_group"]:
        while not _fit(trainer):
            pass  # It stopped before a node was taken, and resumes on others.
    for path in (selected, folder / METRICS, *store.tracked):
        node_files.restore(path)
    if run_folder != folder:
        with atomic_folder(selected) as copy:
            shutil.copytree(run_folder / BEST, copy, dirs_exist_ok=True)
        shutil.rmtree(run_folder, ignore_errors=True)
    return selected / "ranker"


def _fit(trainer: TorchTrainer) -> Any:
    """Runs the workers; returns what they return.

    Raises:
        DivergedError: They return it, because Ray would repeat what they raise.
    """
    if isinstance(value := trainer.fit().return_value, DivergedError):
        raise value
    return value


def train_encoder_on_ray(
    job: EncoderJob,
    folder: Path,
    workers: WorkersConfig,
    node_files: NodeFiles = NodeFiles(),  # noqa: B008
) -> int:
    """Trains a sentence encoder; a run that was interrupted starts again.

    Args:
        job: What is trained.
        folder: Folder of the encoder.
        workers: Resources to use; with `num_workers=0` this process trains, without Ray.
        node_files: How nodes see files of others.

    Returns:
        The number of pairs.
    """
    if workers.num_workers == 0:
        from as2ray.training.encoder_training import run_encoder_job

        return run_encoder_job(job, folder)
    check_plan(workers)
    storage = folder.parent
    check_shared(job.tables, storage, node_files)
    set_start_timeout(is_elastic=False)
    storage_path, filesystem = node_files.train_storage(storage)
    trainer = TorchTrainer(
        _train_encoder_worker,
        train_loop_config={
            "job": job,
            "folder": folder,
            "workers": workers,
            "node_files": node_files,
        },
        scaling_config=_scaling_config(replace(workers, min_workers=None)),
        run_config=RunConfig(
            logging_config=LoggingConfig("WARNING"),
            name=f"{folder.name}-train",
            storage_path=storage_path,
            storage_filesystem=filesystem,
            worker_runtime_env={"env_vars": worker_environment()},
            failure_config=FailureConfig(max_failures=workers.max_failures),
        ),
    )
    num_pairs = int(_fit(trainer))
    node_files.restore(folder)
    shutil.rmtree(storage / f"{folder.name}-train", ignore_errors=True)
    return num_pairs


def _train_encoder_worker(config: dict[str, Any]) -> int | DivergedError:
    from as2ray.training.encoder_training import run_encoder_job

    job, folder, node_files = config["job"], config["folder"], config["node_files"]
    log_to_console()
    node_files.fetch_paths(job.tables)
    num_cpus = bundle_resources(config["workers"]).get("CPU", 1.0)
    torch.set_num_threads(max(1, int(num_cpus)))
    try:
        num_pairs = run_encoder_job(job, folder)
    except DivergedError as error:
        return error
    if ray.train.get_context().get_world_rank() == 0:
        node_files.publish(folder)
    return num_pairs


def _scaling_config(workers: WorkersConfig) -> ScalingConfig:
    return ScalingConfig(
        num_workers=(workers.min_workers, workers.num_workers)
        if workers.min_workers
        else workers.num_workers,
        elastic_resize_monitor_interval_s=workers.elastic_resize_interval_s,
        use_gpu=workers.gpus_per_worker > 0,
        resources_per_worker=bundle_resources(workers),
        label_selector=workers.label_selector or None,
        placement_strategy=workers.placement_strategy,
    )


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
            temporary.write_text(f"{stage_name(folder)}-{uuid4().hex[:8]}")
    return path.read_text()


def list_inputs(job: TrainingJob) -> list[str]:
    """Returns the folders that a job reads; the model may also be an id on a hub."""
    logits = chain.from_iterable(job.teacher_logits)
    return [*job.train_tables, *job.eval_tables.values(), *logits, job.model.path]


def _train_worker(config: dict[str, Any]) -> bool | DivergedError:
    """Trains; returns whether the run is complete, or why the loss ended it."""
    from as2ray.training.run_job import run_job

    workers: WorkersConfig = config["workers"]
    store: _RayTrainCheckpointStore = config["store"]
    log_to_console()
    store.fetch(config["job"])
    if ray.train.get_context().get_world_rank() == 0:
        record_placement_group(config["folder"])
    torch.set_num_threads(max(1, int(bundle_resources(workers).get("CPU", 1.0))))
    num_cpus = workers.num_data_cpus / workers.num_workers
    name = config["job"].run.name or stage_name(Path(config["folder"]))
    try:
        is_complete = run_job(
            config["job"],
            config["folder"],
            store,
            lambda dataset: RayBatchSource(dataset, num_cpus, config["data_group"], name),
        )
    except DivergedError as error:
        return error
    store.publish([BEST])
    return is_complete


@contextmanager
def open_checkpoint(checkpoint: Checkpoint | None) -> Iterator[Path | None]:
    """Yields a Ray checkpoint as a folder; a copy that had to be made is removed afterwards."""
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield Path(folder)


@dataclass
class _RayTrainCheckpointStore:
    """Reports resume states to Ray Train, which uploads them in the background; keeps the last."""

    folder: Path
    resume_interval_s: float
    check_every_steps: int
    is_watched: bool
    """Whether callbacks listen to the metrics."""
    node_files: NodeFiles
    tracked: list[Path]
    """Folders of trackers outside of the run's."""
    published: set[Path] = field(default_factory=set)
    """Weights that this process has published."""

    def fetch(self, job: TrainingJob) -> None:
        """Fetches what a worker reads, and what an earlier attempt of the run has published."""
        self.node_files.fetch_paths(list_inputs(job))
        is_first = ray.train.get_context().get_world_rank() == 0
        # All workers must know whether the run is complete.
        for path in [self.folder, *self.tracked] if is_first else [self.folder / BEST]:
            self.node_files.restore(path)

    def publish(self, names: Iterable[str]) -> None:
        """Publishes files of the run's folder, its metrics and the files of trackers."""
        if ray.train.get_context().get_world_rank() == 0:
            for path in (*(self.folder / name for name in names), self.folder / METRICS):
                self.node_files.publish(path)
            for path in self.tracked:
                self.node_files.publish(path)

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """See `CheckpointStore`."""
        return open_checkpoint(ray.train.get_checkpoint())

    def save(self, checkpoint: Path | None) -> None:
        """See `CheckpointStore`; Ray removes the folder after its upload."""
        if checkpoint is not None:  # Waits for the upload before.
            ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
        if not self.node_files.is_local:
            # A state names the best weights, which must be there before it.
            new = {*self.folder.glob(f"{BEST}-*")} - self.published
            self.publish(path.name for path in new)
            self.published |= new
        self._report({}, checkpoint)

    def report(self, metrics: Metrics) -> None:
        """See `CheckpointStore`."""
        if self.is_watched:
            self._report(dict(metrics), None)

    def is_node_leaving(self) -> bool:
        """See `CheckpointStore`; Ray learns of it within five seconds."""
        return ray.train.get_preemption_info() is not None

    def _report(self, metrics: dict[str, float], checkpoint: Path | None) -> None:
        """Reports in the background; reports reach Ray in order, and all workers must call it."""
        ray.train.report(
            metrics,
            checkpoint=Checkpoint.from_directory(str(checkpoint)) if checkpoint else None,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        )
