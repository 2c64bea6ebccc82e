"""Hyperparameter searches with Ray Tune and Optuna, over stored scores or over training runs."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from as2ray.distributed.plan import max_concurrent_runs
from as2ray.distributed.train import open_checkpoint, train_on_ray
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.training.config import SELECTION_METRIC
from as2ray.training.job import TrainingJob

Metrics = Mapping[str, float]


def run_search(
    run_trial: Callable[[Mapping[str, Any], Any], Metrics],
    space: Callable[[Any], None],
    modes: Mapping[str, str],
    data: Any,
    folder: str | Path,
    num_trials: int = 100,
    seed: int = 0,
) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Runs an Optuna search for several measures at once.

    Args:
        run_trial: `run_trial(choice, data)` returns the measures of a trial.
        space: Samples a choice from an Optuna trial (define-by-run).
        modes: `min` or `max` for each measure.
        data: Data that every trial reads; stored once in the object store.
        folder: Folder of Ray Tune's files.
        num_trials: Number of trials.
        seed: Seed of the sampler.

    Returns:
        The choice and the measures of every trial.
    """
    data_ref = ray.put(data)

    def run(config: dict[str, Any]) -> None:
        tune.report(dict(run_trial(config, ray.get(data_ref))))

    names = list(modes)
    searcher = OptunaSearch(
        space=space, metric=names, mode=[modes[name] for name in names], seed=seed
    )
    results = _run_tuner(run, {"search_alg": searcher, "num_samples": num_trials}, None, folder)
    return [(dict(r.config), {name: float(r.metrics[name]) for name in names}) for r in results]


def run_grid(
    run_trial: Callable[[Any, Any], list[Any]],
    choices: Sequence[Any],
    data: Any,
    folder: str | Path,
) -> list[Any]:
    """Runs one trial for every choice; returns their results in one list.

    Args:
        run_trial: `run_trial(choice, data)` returns a list of plain values. It should take much
            longer than Ray Tune needs to start a trial.
        choices: One for each trial.
        data: Data that every trial reads; stored once in the object store.
        folder: Folder of Ray Tune's files.
    """
    if not choices:
        return []
    data_ref = ray.put(data)

    def run(config: dict[str, Any]) -> None:
        tune.report({"results": run_trial(config["choice"], ray.get(data_ref))})

    results = _run_tuner(run, {}, {"choice": tune.grid_search(list(choices))}, folder)
    return [value for result in results for value in result.metrics["results"]]


def search_training(
    create_job: Callable[[Mapping[str, Any]], TrainingJob],
    space: Callable[[Any], None],
    folder: str | Path,
    workers: WorkersConfig,
    num_trials: int = 20,
    grace_period: int = 1,
    seed: int = 0,
) -> tuple[dict[str, Any], float]:
    """Runs an Optuna search over training runs, in which ASHA stops bad runs early.

    A search that was interrupted is resumed; finished trials are not run again.

    Args:
        create_job: Creates the training run of a choice.
        space: Samples a choice from an Optuna trial (define-by-run).
        folder: Folder of Ray Tune's files, which TensorBoard can show.
        workers: Resources of each trial; with `num_workers=0` it trains in its own process.
        num_trials: Number of trials.
        grace_period: Evaluations before a trial may be stopped.
        seed: Seed of the sampler.

    Returns:
        The choice with the highest dev measure, and that measure.
    """
    folder = Path(folder).resolve()

    def run(config: dict[str, Any]) -> None:
        trial_folder = folder / "runs" / tune.get_context().get_trial_id()
        if workers.num_workers == 0:
            from as2ray.training.run_job import run_job

            run_job(create_job(config), trial_folder, _RayTuneCheckpointStore())
        else:
            train_on_ray(create_job(config), trial_folder, workers, [TuneReportCallback()])

    trial_resources = tune.PlacementGroupFactory([_trial_resources(workers)])
    trainable = tune.with_resources(run, trial_resources)
    if tune.Tuner.can_restore(str(folder)):
        tuner = tune.Tuner.restore(str(folder), trainable=trainable, resume_errored=True)
    else:
        searcher = OptunaSearch(space=space, metric=SELECTION_METRIC, mode="max", seed=seed)
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                metric=SELECTION_METRIC,
                mode="max",
                num_samples=num_trials,
                max_concurrent_trials=max_concurrent_runs(workers) if workers.num_workers else None,
                search_alg=searcher,
                scheduler=ASHAScheduler(max_t=10_000, grace_period=grace_period),
            ),
            run_config=tune.RunConfig(name=folder.name, storage_path=str(folder.parent), verbose=0),
        )
    results = tuner.fit()
    if results.num_errors == len(results):
        raise results.errors[0]
    best = results.get_best_result(SELECTION_METRIC, "max", scope="all")
    return dict(best.config), float(best.metrics_dataframe[SELECTION_METRIC].max())


def _trial_resources(workers: WorkersConfig) -> dict[str, float]:
    """Returns the resources of a trial itself: those of the plan if it trains without workers.

    Otherwise it takes next to nothing. A trial that occupied a CPU could wait without end for
    workers that need that CPU.
    """
    if workers.num_workers == 0:
        return {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
    return {"memory": 1.0}


class _RayTuneCheckpointStore:
    """Reports the checkpoints of a run in the trial's own process to Ray Tune."""

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """See `CheckpointStore`."""
        return open_checkpoint(tune.get_checkpoint())

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """See `CheckpointStore`; Ray Tune may stop the trial here."""
        ray_checkpoint = tune.Checkpoint.from_directory(str(checkpoint)) if checkpoint else None
        tune.report(dict(metrics), checkpoint=ray_checkpoint)
        if checkpoint is not None:
            shutil.rmtree(checkpoint, ignore_errors=True)


def _run_tuner(
    trainable: Callable[[dict[str, Any]], None],
    tune_options: dict[str, Any],
    param_space: dict[str, Any] | None,
    folder: str | Path,
) -> tune.ResultGrid:
    folder = Path(folder).resolve()
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space=param_space,
        tune_config=tune.TuneConfig(reuse_actors=True, **tune_options),
        run_config=tune.RunConfig(name=folder.name, storage_path=str(folder.parent), verbose=0),
    )
    results = tuner.fit()
    if results.num_errors:
        raise results.errors[0]
    return results
