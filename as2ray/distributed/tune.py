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

from as2ray.distributed.plan import Workers, side_by_side
from as2ray.distributed.train import fit, reading
from as2ray.training.config import SELECTION
from as2ray.training.job import Job

Metrics = Mapping[str, float]


def search(
    trial: Callable[[Mapping[str, Any], Any], Metrics],
    space: Callable[[Any], None],
    modes: Mapping[str, str],
    data: Any,
    folder: str | Path,
    trials: int = 100,
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
        tune.report(dict(trial(config, ray.get(held))))

    names = list(modes)
    searcher = OptunaSearch(
        space=space, metric=names, mode=[modes[name] for name in names], seed=seed
    )
    results = _fit(run, {"search_alg": searcher, "num_samples": trials}, None, folder)
    return [(dict(r.config), {name: float(r.metrics[name]) for name in names}) for r in results]


def grid(
    work: Callable[[Any, Any], list[Any]], choices: Sequence[Any], data: Any, folder: str | Path
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
        tune.report({"found": work(config["choice"], ray.get(held))})

    results = _fit(run, {}, {"choice": tune.grid_search(list(choices))}, folder)
    return [one for result in results for one in result.metrics["found"]]


def search_training(
    job: Callable[[Mapping[str, Any]], Job],
    space: Callable[[Any], None],
    folder: str | Path,
    workers: Workers,
    trials: int = 20,
    grace: int = 1,
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
        if workers.count == 0:
            from as2ray.training.train import train

            train(job(config), trial, _TuneRun())
        else:
            fit(job(config), trial, workers, [TuneReportCallback()])

    held = tune.with_resources(run, tune.PlacementGroupFactory([_held(workers)]))
    if tune.Tuner.can_restore(str(folder)):
        tuner = tune.Tuner.restore(str(folder), trainable=held, resume_errored=True)
    else:
        searcher = OptunaSearch(space=space, metric=SELECTION, mode="max", seed=seed)
        tuner = tune.Tuner(
            held,
            tune_config=tune.TuneConfig(
                metric=SELECTION,
                mode="max",
                num_samples=trials,
                max_concurrent_trials=side_by_side(workers) if workers.count else None,
                search_alg=searcher,
                scheduler=ASHAScheduler(max_t=10_000, grace_period=grace),
            ),
            run_config=tune.RunConfig(name=folder.name, storage_path=str(folder.parent), verbose=0),
        )
    results = tuner.fit()
    if results.num_errors == len(results):
        raise results.errors[0]
    best = results.get_best_result(SELECTION, "max", scope="all")
    return dict(best.config), float(best.metrics_dataframe[SELECTION].max())


def _held(workers: Workers) -> dict[str, float]:
    """What a trial itself takes: the plan's, or where its workers take that, next to nothing.

    A trial that holds a CPU while its workers wait for one waits with them for ever.
    """
    if workers.count == 0:
        return {"CPU": workers.cpus, "GPU": workers.gpus}
    return {"memory": 1.0}


class _TuneRun:
    """Reports a run in the trial's own process to Ray Tune."""

    def resume(self) -> AbstractContextManager[Path | None]:
        """The trial's last checkpoint."""
        return reading(tune.get_checkpoint())

    def report(self, metrics: Metrics, checkpoint: Path | None) -> None:
        """Hands metrics and checkpoint over; Tune may end the trial here."""
        handed = tune.Checkpoint.from_directory(str(checkpoint)) if checkpoint else None
        tune.report(dict(metrics), checkpoint=handed)
        if checkpoint is not None:
            shutil.rmtree(checkpoint, ignore_errors=True)


def _fit(
    run: Callable[[dict[str, Any]], None],
    how: dict[str, Any],
    space: dict[str, Any] | None,
    folder: str | Path,
) -> tune.ResultGrid:
    folder = Path(folder).resolve()
    tuner = tune.Tuner(
        tune.with_resources(run, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(reuse_actors=True, **how),
        run_config=tune.RunConfig(name=folder.name, storage_path=str(folder.parent), verbose=0),
    )
    results = tuner.fit()
    if results.num_errors:
        raise results.errors[0]
    return results
