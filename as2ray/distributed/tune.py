"""Hyperparameter searches with Optuna under Ray Tune, over stored scores or over training runs."""

import csv
import json
import logging
import math
import os
import pickle
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import ray
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from ray import tune
from ray.exceptions import RayError
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from as2ray.distributed.cluster import PLACEMENT_GROUP, release_placement_group
from as2ray.distributed.node_files import NodeFiles
from as2ray.distributed.plan import max_concurrent_runs
from as2ray.distributed.workers_config import WorkersConfig, gang_resources
from as2ray.errors import SearchError
from as2ray.progress import log_to_console
from as2ray.tables.atomic import atomic_file
from as2ray.training.checkpoint_store import BEST, LocalCheckpointStore, Metrics
from as2ray.training.config import SELECTION_METRIC
from as2ray.training.job import TrainingJob
from as2ray.training.tracking import METRICS, calling_at_end, end_run, read_metrics

logger = logging.getLogger(__name__)

JOURNAL, STUDY = "optuna.journal", "search"
"""Optuna's storage in the folder of a search, which `optuna-dashboard` can show, and its study."""

CONTROLLER, TRIALS = "controller", "trials.jsonl"

MAX_TRIAL_FAILURES = 2
"""Restarts of a trial, besides those of its workers; it resumes from its last checkpoint."""

NO_PROGRESS_S = 300.0
"""Seconds without progress after which a search says what it waits for."""

PUBLISH_S = 10.0
"""Seconds between two times that the state of a search is published for other nodes."""

ABORT_TIMEOUT_S = 60.0
"""Seconds that the workers of a trial that is stopped early have to end."""

TUNE_ENVIRONMENT = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}
"""Settings of Tune: no files of loggers for each trial, and no tables on the console."""

warnings.filterwarnings("ignore", category=ExperimentalWarning, module=__name__)


@dataclass(frozen=True)
class Trial:
    """A trial of a search."""

    number: int
    """From 1, in the order of their start."""
    params: dict[str, Any]
    state: str
    """`running`, `finished`, `stopped` early by ASHA, or `failed`."""
    values: dict[str, float]
    duration_s: float
    epoch: float | None = None
    """Epochs that it trained."""
    name: str = ""
    """Name of its folder."""
    error: str | None = None

    def describe(self, num_trials: int, is_best: bool = False) -> str:
        """Returns a line for the log."""
        params = " ".join(f"{name} {_format(value)}" for name, value in self.params.items())
        head = f"trial {self.number}/{num_trials} {params}"
        if self.error is not None:
            return f"{head}: failed: {self.error}"
        values = ", ".join(f"{name} {_format(value)}" for name, value in self.values.items())
        best = " (best so far)" if is_best else ""
        end = f"; stopped early at epoch {self.epoch:.2g}" if self.state == "stopped" else ""
        return f"{head} -> {values}{best}, {self.duration_s:.3g} s{end}"


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
    search = _Search(Path(folder).resolve(), dict(modes), num_trials)
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

    Raises:
        SearchError: All trials failed.
        KeyboardInterrupt: The search was interrupted.
    """
    folder = Path(folder).resolve()
    modes = {SELECTION_METRIC: "max"}
    search = _Search(folder, modes, num_trials, node_files, workers, create_job)

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
        evaluations = [line for line in lines if SELECTION_METRIC in line]
        selected = max(evaluations, key=lambda line: line[job.training.select_by])
        epoch = evaluations[-1]["epoch"]
        report = {SELECTION_METRIC: selected[SELECTION_METRIC], "epoch": epoch}
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
        key=lambda trial: trial.values[SELECTION_METRIC],
    )
    run_folder = search.run_folder(best.name)
    for path in (run_folder, folder / "trials"):
        node_files.restore(path)
    ranker = run_folder / BEST / "ranker"
    return TrainingSearch(best.params, best.values[SELECTION_METRIC], ranker, run_folder, trials)


@dataclass(frozen=True)
class _Search:
    """One run of Ray Tune with a persistent study, its files and its log."""

    folder: Path
    modes: dict[str, str]
    num_trials: int
    node_files: NodeFiles = field(default_factory=NodeFiles)
    workers: WorkersConfig | None = None
    """Workers of each trial, if trials train."""
    create_job: Callable[[Mapping[str, Any]], TrainingJob] | None = None
    """Creates the training run of each trial, if trials train."""

    @property
    def scratch(self) -> Path:
        """Folder of what a resumed search needs."""
        return self.folder / "scratch"

    def run_folder(self, name: str) -> Path:
        """Returns the folder of a trial's training run."""
        return self.scratch / "runs" / name

    def trial_job(self, name: str, params: Mapping[str, Any]) -> TrainingJob:
        """Returns the training run of a trial."""
        assert self.create_job is not None  # trials train
        job = self.create_job(params)
        return replace(job, run=job.run.with_defaults(self.folder).trial(name, params))

    def run(
        self,
        trainable: Any,
        space: Callable[[Any], None],
        seed: int,
        scheduler: ASHAScheduler | None = None,
        max_concurrent_trials: int | None = None,
    ) -> list[Trial]:
        """Runs or resumes the search, and writes its reports.

        Args:
            trainable: The trainable of Ray Tune.
            space: Samples parameters from an Optuna trial.
            seed: Seed of the sampler.
            scheduler: Stops trials that train; without one, trials share an actor.
            max_concurrent_trials: Maximum number of trials at the same time.

        Returns:
            All trials, in the order of their start.

        Raises:
            SearchError: All trials failed.
            KeyboardInterrupt: The search was interrupted.
        """
        tune_folder = self.scratch / "tune"
        self.release_workers()
        for path in (tune_folder, *self._state_files()):
            self.node_files.restore(path)
        if self._can_resume(tune_folder):
            tuner = tune.Tuner.restore(str(tune_folder), trainable, resume_errored=True)
        else:
            metric, mode = next(iter(self.modes.items()))
            is_single = len(self.modes) == 1
            tuner = tune.Tuner(
                trainable,
                tune_config=tune.TuneConfig(
                    metric=metric if scheduler else None,
                    mode=mode if scheduler else None,
                    num_samples=self.num_trials,
                    max_concurrent_trials=max_concurrent_trials,
                    scheduler=scheduler,
                    search_alg=OptunaSearch(
                        space=space,
                        metric=metric if is_single else list(self.modes),
                        mode=mode if is_single else list(self.modes.values()),
                        storage=self._create_study(),
                        study_name=STUDY,
                        seed=seed,
                    ),
                    reuse_actors=scheduler is None,
                    trial_name_creator=_trial_name,
                    trial_dirname_creator=_trial_name,
                ),
                run_config=tune.RunConfig(
                    name=tune_folder.name,
                    storage_path=str(self.scratch),
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=MAX_TRIAL_FAILURES),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    callbacks=[_SearchLog(self)],
                ),
            )
        # It misses the files of Tune's own loggers, which are switched off.
        logging.getLogger("ray.tune.analysis").setLevel(logging.ERROR)
        try:
            with _signals(), _environment(TUNE_ENVIRONMENT):
                tuner.fit()
        finally:
            self.release_workers()
            self.publish_state()
        trials = self.read_trials()
        num_ended = sum(trial.state != "running" for trial in trials)
        if num_ended < self.num_trials:
            raise KeyboardInterrupt(
                f"the search was interrupted after {num_ended} of {self.num_trials} trials; "
                "run it again: it resumes"
            )
        self._write_reports(trials)
        if not any(trial.state == "finished" for trial in trials):
            raise SearchError(
                f"none of the {self.num_trials} trials in {self.folder} finished",
                fix="correct the causes, which the log tells, and run again: failed trials resume",
            )
        return trials

    def _state_files(self) -> list[Path]:
        """Returns the files that a resumed search needs beside Tune's own."""
        return [self.folder / JOURNAL, self.scratch / "journal_size", self.scratch / TRIALS]

    def publish_state(self) -> None:
        """Publishes what a resumed search needs, Tune's own state first."""
        for path in (self.scratch / "tune", *self._state_files()):
            self.node_files.publish(path)

    def _can_resume(self, tune_folder: Path) -> bool:
        """Returns whether Tune has a snapshot; returns Optuna's journal to that state, or to none.

        Trials that started after the snapshot are unknown to Tune, and start again.
        """
        journal, size, trials = self._state_files()
        if size.exists() and any(tune_folder.glob("experiment_state-*.json")):
            os.truncate(journal, int(size.read_text()))
            return True
        self.scratch.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(tune_folder, ignore_errors=True)
        for path in (journal, size, trials):
            path.unlink(missing_ok=True)
        return False

    def _create_study(self) -> JournalStorage:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(_Journal(str(self.folder / JOURNAL)))
        directions = [StudyDirection[f"{mode}imize".upper()] for mode in self.modes.values()]
        study = optuna.create_study(storage=storage, study_name=STUDY, directions=directions)
        study.set_metric_names(list(self.modes))
        return storage

    def write_trial(self, trial: Trial) -> None:
        """Appends the state of a trial to the search's file of trials."""
        with (self.scratch / TRIALS).open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")

    def read_trials(self) -> list[Trial]:
        """Returns the last state of each trial that was started, in order."""
        lines = read_metrics(self.scratch / TRIALS)
        trials: dict[int, Any] = {int(line["number"]): line for line in lines}
        return [Trial(**trials[number]) for number in sorted(trials)]

    def release_workers(self) -> None:
        """Removes the placement groups that killed trials have left."""
        for path in self.run_folder("").glob(f"*/{PLACEMENT_GROUP}"):
            release_placement_group(path.parent)

    def _write_reports(self, trials: list[Trial]) -> None:
        """Writes the table of trials as CSV and as Markdown, and plots."""
        from as2ray.evaluation.report import markdown_table

        rows = [
            {"trial": trial.number, "state": trial.state, **trial.values, "epoch": trial.epoch}
            | {"seconds": round(trial.duration_s, 2), **trial.params}
            for trial in trials
        ]
        rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with (self.folder / "trials.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        cells = [[_format(row.get(name, "")) for name in columns] for row in rows]
        (self.folder / "search.md").write_text(markdown_table(columns, cells) + "\n")
        storage = JournalStorage(_Journal(str(self.folder / JOURNAL)))
        _draw(optuna.load_study(study_name=STUDY, storage=storage), self.folder)


class _SearchLog(tune.Callback):  # type: ignore[misc]
    """Logs every trial and why none makes progress, and ends workers of trials that were stopped.

    Args:
        search: The search.
    """

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.progress_at = self.published_at = time.monotonic()
        self.trials = {trial.number: trial for trial in search.read_trials()}
        self.controllers: dict[str, Any] = {}
        """Controllers of Ray Train by name of the trial."""

    def __getstate__(self) -> dict[str, Any]:
        return {"search": self.search}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def get_state(self) -> None:
        """Tune calls this with every snapshot; remembers the state of Optuna's journal."""
        size = (self.search.folder / JOURNAL).stat().st_size
        with atomic_file(self.search.scratch / "journal_size") as temporary:
            temporary.write_text(str(size))

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See `tune.Callback`."""
        self._update(trial, "running")

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """See `tune.Callback`."""
        self.progress_at = time.monotonic()
        self.controllers[str(trial)] = result.pop(CONTROLLER, None)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See `tune.Callback`."""
        is_finished = trial.last_result.get("finished", False)
        controller = self.controllers.pop(str(trial), None)
        if controller is not None and not is_finished:
            # Without it, the controller is killed with the trial and its group stays reserved.
            with suppress(RayError):  # It ends its own process.
                ray.get(controller.abort.remote(), timeout=ABORT_TIMEOUT_S)
        self._update(trial, "finished" if is_finished else "stopped")

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See `tune.Callback`."""
        self._update(trial, "failed")

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See `tune.Callback`."""
        release_placement_group(self.search.run_folder(str(trial)))

    def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
        """Says every few minutes what a search waits for in which no trial has its workers."""
        if time.monotonic() - self.published_at > PUBLISH_S:
            self.search.publish_state()
            self.published_at = time.monotonic()
        workers, is_running = self.search.workers, any(t.status == "RUNNING" for t in trials)
        if workers is not None and workers.num_workers:
            is_running = any(self.search.run_folder("").glob(f"*/{PLACEMENT_GROUP}"))
        if is_running:
            self.progress_at = time.monotonic()
        elif time.monotonic() - self.progress_at > NO_PROGRESS_S:
            self.progress_at = time.monotonic()
            total, free = ray.cluster_resources(), ray.available_resources()
            names = [name for name in ("CPU", "GPU") if name in total]
            logger.warning(
                "no trial has had its workers for %.3g minutes: %s are free, and each needs %s",
                NO_PROGRESS_S / 60,
                ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name}" for name in names),
                gang_resources(workers) if workers else "1 CPU",
            )

    def _update(self, tune_trial: Any, state: str) -> None:
        """Writes, and if it has ended logs, the state of a trial."""
        self.progress_at = time.monotonic()
        result = tune_trial.last_result or {}
        trial = Trial(
            number=_trial_number(tune_trial),
            params=dict(tune_trial.config),
            state=state,
            values={name: float(result[name]) for name in self.search.modes if name in result},
            duration_s=float(result.get("time_total_s", 0.0)),
            epoch=result.get("epoch"),
            name=str(tune_trial),
            error=_describe_error(tune_trial) if state == "failed" else None,
        )
        others = [other for other in self.trials.values() if other.number != trial.number]
        self.trials[trial.number] = trial
        self.search.write_trial(trial)
        if state == "running":
            return
        release_placement_group(self.search.run_folder(str(tune_trial)))
        if state == "stopped" and self.search.create_job:
            job = self.search.trial_job(trial.name, trial.params)
            end_run(job.tracking, job.run, "KILLED")
        logger.info(
            trial.describe(self.search.num_trials, _is_best(trial, others, self.search.modes))
        )


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


class _Journal(JournalFileBackend):
    """Optuna's journal with a single writer: no lock, and no wait for the disk at every entry."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """See `JournalFileBackend`."""
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs))


def _is_best(trial: Trial, others: list[Trial], modes: Mapping[str, str]) -> bool:
    """Returns whether a finished trial is better than all others; always False for two measures."""
    if len(modes) != 1 or trial.state != "finished":
        return False
    [(name, mode)] = modes.items()
    sign = 1 if mode == "max" else -1
    values = [sign * other.values[name] for other in others if other.state == "finished"]
    return sign * trial.values[name] > max(values, default=float("-inf"))


def _draw(study: optuna.Study, folder: Path) -> None:
    """Draws the Pareto front of a search for several measures, else history and importance."""
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as draw

    plots: dict[str, Any]
    finished = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    params = {name for trial in finished for name in trial.params}
    if len(study.directions) > 1:
        plots = {"pareto": draw.plot_pareto_front(study)}
    else:
        plots = {"history": draw.plot_optimization_history(study)}
        if len(finished) > 1 and len(params) > 1:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            plots["importance"] = draw.plot_param_importances(study, evaluator=evaluator)
            plots["parallel"] = draw.plot_parallel_coordinate(study)
    for name, axes in plots.items():
        axes.figure.savefig(folder / f"search-{name}.png", bbox_inches="tight")
        pyplot.close(axes.figure)


def _describe_error(trial: Any) -> str:
    """Returns the first line of the error of a trial of Tune, without Ray's around it."""
    error = pickle.loads(Path(trial.pickled_error_file).read_bytes())
    error = getattr(error, "cause", None) or error
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _trial_number(trial: Any) -> int:
    """Returns the number of a trial of Tune, with which its tag begins."""
    return int(trial.experiment_tag.split("_")[0])


def _trial_name(trial: Any) -> str:
    """Returns the name of a trial and of its folder: `003-alpha=0.1,temperature=3`."""
    params = ",".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in trial.evaluated_params.items()
    )
    return f"{_trial_number(trial):03d}-{params}"[:200]


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _trial_resources(workers: WorkersConfig) -> dict[str, float]:
    """Returns the resources of a trial itself: those of the plan if it trains without workers.

    Otherwise it takes next to nothing. A trial that occupied a CPU could wait without end for
    workers that need that CPU.
    """
    if workers.num_workers == 0:
        return {"CPU": workers.cpus_per_worker, "GPU": workers.gpus_per_worker}
    return {"memory": 1.0}


@contextmanager
def _signals() -> Iterator[None]:
    """Lets SIGTERM end a search as Ctrl-C does, and restores the handlers that Tune replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process inside the block."""
    previous = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
            os.environ.update({name: previous[name]} if name in previous else {})
