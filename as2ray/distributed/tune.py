"""Hyperparameter searches with Optuna under Ray Tune, over stored scores or over training runs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler

from as2ray.console.configuration import log_to_console
from as2ray.distributed.node_files import NodeFiles
from as2ray.distributed.plan import max_concurrent_runs
from as2ray.distributed.trials import Trial
from as2ray.distributed.tune_run import CONTROLLER, TuneRun
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.training.checkpoint_store import BEST, LocalCheckpointStore, Metrics
from as2ray.training.config import SELECTION_METRIC
from as2ray.training.job import TrainingJob
from as2ray.training.tracking import METRICS, calling_at_end, end_run, read_metrics


@dataclass(frozen=True)
class TrainingSearch:
    """What a search over training runs found."""

    params: dict[str, Any]
    """Parameters of the best trial."""
    value: float
    """Its dev measure."""
    ranker: Path
    """Folder of the ranker that it trained."""
    run_folder: Path
    """Folder of its run, with its metrics."""
    trials: list[Trial]

    @property
    def failed_trials(self) -> list[int]:
        """Numbers of the trials that failed."""
        return [trial.number for trial in self.trials if trial.state == "failed"]


def search_scores(
    evaluate: Callable[[Mapping[str, Any], Any], Metrics],
    space: Callable[[Any], None],
    modes: Mapping[str, str],
    data: Any,
    folder: str | Path,
    num_trials: int = 100,
    seed: int = 0,
) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Runs an Optuna search whose trials evaluate stored scores, one after the other in one actor.

    The trials follow from the seed. A search that was interrupted in the same folder is resumed.

    Args:
        evaluate: `evaluate(params, data)` returns the measures of a trial. Its module should load
            quickly, because the actor loads it too.
        space: Samples parameters from an Optuna trial (define-by-run); it is pickled by its name.
        modes: `min` or `max` for each measure.
        data: Data that every trial reads; stored once in the object store.
        folder: Folder of Optuna's journal, of the table of trials and of the plots. `scratch` in it
            holds what a resumed search needs.
        num_trials: Number of trials.
        seed: Seed of the sampler.

    Returns:
        Parameters and measures of every trial that did not fail.

    Raises:
        SearchError: All trials failed.
        KeyboardInterrupt: The search was interrupted.
    """
    if not num_trials:
        return []
    trainable = tune.with_parameters(_ScoreTrial, evaluate=evaluate, data=data)
    search = TuneRun(Path(folder).resolve(), dict(modes), num_trials)
    trials = search.run(
        tune.with_resources(trainable, {"cpu": 1}), space, seed, max_concurrent_trials=1
    )
    return [(trial.params, trial.values) for trial in trials if trial.state == "finished"]


def search_training(
    create_job: Callable[[Mapping[str, Any]], TrainingJob],
    space: Callable[[Any], None],
    folder: str | Path,
    workers: WorkersConfig,
    num_trials: int = 20,
    grace_epochs: float = 1.0,
    seed: int = 0,
    node_files: NodeFiles = NodeFiles(),  # noqa: B008
    metric: str = SELECTION_METRIC,
) -> TrainingSearch:
    """Runs an Optuna search over training runs, in which ASHA stops bad runs early.

    Runs are compared after equal numbers of epochs. A search that was interrupted in the same
    folder is resumed; trials that ended are not run again.

    Args:
        create_job: Creates the training run of a choice.
        space: Samples parameters from an Optuna trial (define-by-run).
        folder: Folder as in `search_scores`.
        workers: Resources of each trial; with `num_workers=0` it trains in its own process.
        num_trials: Number of trials.
        grace_epochs: Epochs before a trial may be stopped; at least its warm-up.
        seed: Seed of the sampler.
        node_files: How nodes see files of others. If they publish them, another node goes on with
            a search that was interrupted.
        metric: Measure on dev by which trials are compared.

    Raises:
        SearchError: All trials failed.
        KeyboardInterrupt: The search was interrupted.
    """
    folder = Path(folder).resolve()
    modes = {metric: "max"}
    search = TuneRun(folder, modes, num_trials, node_files, workers, create_job)

    def run(params: dict[str, Any]) -> None:
        log_to_console()
        name = tune.get_context().get_trial_name()
        run_folder, job = search.run_folder(name), search.trial_job(name, params)
        if workers.num_workers:
            from as2ray.distributed.train import train_on_ray

            with calling_at_end(partial(end_run, job.tracking, job.run)):
                callbacks = [_TuneReport(_last_epoch(job))]
                train_on_ray(job, run_folder, workers, callbacks, node_files)
        else:
            from as2ray.distributed.train import list_inputs
            from as2ray.training.run_job import run_job

            node_files.fetch_paths(list_inputs(job))
            node_files.restore(run_folder)
            store = _TuneCheckpointStore(run_folder, workers.resume_interval_s)
            store.epochs = _last_epoch(job)
            run_job(job, run_folder, store)
            for path in (run_folder, Path(job.run.folder)):
                node_files.publish(path)
        lines = read_metrics(run_folder / METRICS)
        evaluations = [line for line in lines if metric in line]
        # Of equal checkpoints a run keeps the latest.
        selected = max(reversed(evaluations), key=lambda line: line[job.training.select_by])
        report = {metric: selected[metric], "epoch": evaluations[-1]["epoch"]}
        tune.report({**report, "finished": True})

    trials = search.run(
        tune.with_resources(run, tune.PlacementGroupFactory([_trial_resources(workers)])),
        space,
        seed,
        max_concurrent_trials=max_concurrent_runs(workers) if workers.num_workers else None,
        # A trial is compared at each rung by its first evaluation there, not by later ones.
        scheduler=ASHAScheduler(
            time_attr="epoch", max_t=10_000, grace_period=grace_epochs, stop_last_trials=False
        ),
    )
    # The value of a trial that was stopped is not that of a whole run.
    best = max(
        [trial for trial in trials if trial.state == "finished"],
        key=lambda trial: trial.values[metric],
    )
    run_folder = search.run_folder(best.name)
    for path in (run_folder, folder / "trials"):
        node_files.restore(path)
    ranker = run_folder / BEST / "ranker"
    return TrainingSearch(best.params, best.values[metric], ranker, run_folder, trials)


class _ScoreTrial(tune.Trainable):  # type: ignore[misc]
    """Evaluates stored scores. A class of Tune takes a fifth of the time of a function."""

    def setup(self, config: dict[str, Any], evaluate: Any, data: Any) -> None:
        self.evaluate, self.data = evaluate, data

    def step(self) -> dict[str, Any]:
        measures = {name: float(v) for name, v in self.evaluate(self.config, self.data).items()}
        return {**measures, "finished": True, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return True


def _last_epoch(job: TrainingJob) -> float:
    """Returns the epoch of the last evaluation; infinity if a number of steps ends the run."""
    return math.inf if job.training.max_steps else job.training.epochs


class _TuneReport(TuneReportCallback):  # type: ignore[misc]
    """Reports a run of Ray Train to Tune, with a handle of its controller, which runs this.

    Args:
        epochs: Epochs of the run. Tune learns of the last one when the run has finished.
    """

    def __init__(self, epochs: float) -> None:
        super().__init__()
        self.epochs = epochs

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        if metrics[0] and metrics[0]["epoch"] < self.epochs:  # A resume state has no metrics.
            controller = ray.get_runtime_context().current_actor
            super().after_report(run_context, [{**metrics[0], CONTROLLER: controller}], None)


class _TuneCheckpointStore(LocalCheckpointStore):
    """Keeps the resume states of a run in the trial's own process; reports metrics to Tune."""

    epochs: float
    """See `_TuneReport`."""

    def report(self, metrics: Metrics) -> None:
        """See `CheckpointStore`; Ray Tune may stop the trial here."""
        if metrics["epoch"] < self.epochs:
            tune.report(dict(metrics))


def _trial_resources(workers: WorkersConfig) -> dict[str, float]:
    """Returns the resources of a trial itself: those of the plan if it trains without workers.

    Otherwise it takes next to nothing. A trial that occupied a CPU could wait without end for
    workers that need that CPU.
    """
    if workers.num_workers == 0:
        return {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
    return {"memory": 1.0}
