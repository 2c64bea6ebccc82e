"""Searches under Ray Tune with Optuna: plain trials over stored scores, and training runs.

Knows Ray Tune. Must not know what a trial computes.
"""

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

from as2ray.distributed.plan import WorkersConfig, max_concurrent_runs
from as2ray.distributed.train import open_checkpoint, train_on_ray
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
    """An Optuna search for several measures at once; what each trial chose and found.

    Args:
        trial: (choice, data) -> measures.
        space: What Optuna's trials are asked, define-by-run.
        modes: For each measure `min` or `max`.
        data: What every trial reads; kept once in the object store.
        folder: Where Tune writes.
        trials: How many.
        seed: Of the sampler.
    """
    held = ray.put(data)

    def run(config: dict[str, Any]) -> None:
        tune.report(dict(run_trial(config, ray.get(held))))

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
    """`work(choice, data)` of every choice, end to end.

    Args:
        work: What one trial computes, as plain values; make it large enough to be worth one.
        choices: Of the trials.
        data: What every trial reads; kept once in the object store.
        folder: Where Tune writes.
    """
    if not choices:
        return []
    held = ray.put(data)

    def run(config: dict[str, Any]) -> None:
        tune.report({"found": run_trial(config["choice"], ray.get(held))})

    results = _run_tuner(run, {}, {"choice": tune.grid_search(list(choices))}, folder)
    return [one for result in results for one in result.metrics["found"]]


def search_training(
    create_job: Callable[[Mapping[str, Any]], TrainingJob],
    space: Callable[[Any], None],
    folder: str | Path,
    workers: WorkersConfig,
    num_trials: int = 20,
    grace_period: int = 1,
    seed: int = 0,
) -> tuple[dict[str, Any], float]:
    """An Optuna search over training runs, bad ones stopped early by ASHA; the best choice.

    A search that was interrupted goes on: finished trials are not run again.

    Args:
        job: A trial's choice to a training run.
        space: What Optuna's trials are asked, define-by-run.
        folder: Where Tune writes; TensorBoard reads it.
        workers: What each trial takes of the cluster; with `count=0` it trains in its own process.
        trials: How many.
        grace: Validations before a trial may be stopped.
        seed: Of the sampler.

    Returns:
        The choice of the highest dev measure, and that measure.
    """
    folder = Path(folder).resolve()

    def run(config: dict[str, Any]) -> None:
        trial = folder / "runs" / tune.get_context().get_trial_id()
        if workers.num_workers == 0:
            from as2ray.training.run_job import run_job

            run_job(create_job(config), trial, _RayTuneCheckpointStore())
        else:
            train_on_ray(create_job(config), trial, workers, [TuneReportCallback()])

    held = tune.with_resources(run, tune.PlacementGroupFactory([_trial_resources(workers)]))
    if tune.Tuner.can_restore(str(folder)):
        tuner = tune.Tuner.restore(str(folder), trainable=held, resume_errored=True)
    else:
        searcher = OptunaSearch(space=space, metric=SELECTION_METRIC, mode="max", seed=seed)
        tuner = tune.Tuner(
            held,
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
    """What a trial itself takes: the plan's, or where its workers take that, next to nothing.

    A trial that holds a CPU while its workers wait for one waits with them for ever.
    """
    if workers.num_workers == 0:
        return {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
    return {"memory": 1.0}


class _RayTuneCheckpointStore:
    """Reports a run in the trial's own process to Ray Tune."""

    def open_last_checkpoint(self) -> AbstractContextManager[Path | None]:
        """The trial's last checkpoint."""
        return open_checkpoint(tune.get_checkpoint())

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """Hands metrics and checkpoint over; Tune may end the trial here."""
        handed = tune.Checkpoint.from_directory(str(checkpoint)) if checkpoint else None
        tune.report(dict(metrics), checkpoint=handed)
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
