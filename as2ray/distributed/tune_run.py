"""One run of Ray Tune with a persistent Optuna study: start, resumption, log, files and end."""

import json
import logging
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
import ray
from optuna.storages import JournalStorage
from optuna.study import StudyDirection
from ray import tune
from ray.exceptions import RayError
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from as2ray.distributed.cluster import PLACEMENT_GROUP, release_placement_group
from as2ray.distributed.node_files import NodeFiles
from as2ray.distributed.trials import JOURNAL, STUDY, Journal, Trial, is_best, write_reports
from as2ray.distributed.workers_config import WorkersConfig, gang_resources
from as2ray.errors import DivergedError, SearchError
from as2ray.tables.atomic import atomic_file
from as2ray.training.job import TrainingJob
from as2ray.training.tracking import end_run, read_metrics

logger = logging.getLogger(__name__)

TRIALS, CONTROLLER = "trials.jsonl", "controller"
"""File of the states of trials; entry of a trial's result with the controller of its run."""

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


@dataclass(frozen=True)
class TuneRun:
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
        # It misses the files of Tune's own loggers, which are switched off.
        logging.getLogger("ray.tune.analysis").setLevel(logging.ERROR)
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
                    callbacks=[_RunLog(self, scheduler)],
                ),
            )
        try:
            # After Ctrl-C Tune returns. Where Ray cancels the task that it runs in, it may raise.
            with _signals(), _environment(TUNE_ENVIRONMENT), suppress(KeyboardInterrupt):
                tuner.fit()
        finally:
            self.release_workers()
            self.publish_state()
        trials = self.read_trials()
        num_ended = sum(trial.state != "running" for trial in trials)
        if num_ended < self.num_trials:
            for trial in trials:
                if trial.state == "running":
                    self.end_tracking(trial)
            raise KeyboardInterrupt(
                f"the search was interrupted after {num_ended} of {self.num_trials} trials; "
                "run it again: it resumes"
            )
        write_reports(trials, self.folder)
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

        Trials that started after the snapshot are unknown to Tune, and start again. So do all
        trials of a folder that was moved, whose runs resume where they have equal parameters.
        """
        journal, size, trials = self._state_files()
        num_bytes, _, folder = size.read_text().partition(" ") if size.exists() else ("", "", "")
        # The snapshot holds absolute paths.
        if folder == str(self.folder) and any(tune_folder.glob("experiment_state-*.json")):
            os.truncate(journal, int(num_bytes))
            return True
        self.scratch.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(tune_folder, ignore_errors=True)
        for path in (journal, size, trials):
            path.unlink(missing_ok=True)
        return False

    def _create_study(self) -> JournalStorage:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(Journal(str(self.folder / JOURNAL)))
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

    def end_tracking(self, trial: Trial) -> None:
        """Says to trackers that the run of a trial was killed, as its process cannot."""
        if self.create_job:
            job = self.trial_job(trial.name, trial.params)
            end_run(job.tracking, job.run, "KILLED")

    def release_workers(self) -> None:
        """Removes the placement groups that killed trials have left."""
        for path in self.run_folder("").glob(f"*/{PLACEMENT_GROUP}"):
            release_placement_group(path.parent)


class _RunLog(tune.Callback):  # type: ignore[misc]
    """Logs every trial and why none makes progress, and ends workers of trials that were stopped.

    Tune's snapshots leave out the scheduler, so its state is stored as that of this callback.

    Args:
        search: The search.
        scheduler: Its scheduler.
    """

    def __init__(self, search: TuneRun, scheduler: ASHAScheduler | None) -> None:
        self.search, self.scheduler = search, scheduler
        self.progress_at = self.published_at = time.monotonic()
        self.trials = {trial.number: trial for trial in search.read_trials()}
        self.earlier = dict(self.trials)
        """Trials as the interrupted search left them that this one goes on with."""
        self.controllers: dict[str, Any] = {}
        """Controllers of Ray Train by name of the trial."""

    def __getstate__(self) -> dict[str, Any]:
        return {"search": self.search, "scheduler": self.scheduler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def get_state(self) -> dict[str, Any] | None:
        """Tune calls this with every snapshot; remembers the journal's size, and the folder.

        Returns the state of the scheduler, which Tune writes at once.
        """
        size = (self.search.folder / JOURNAL).stat().st_size
        with atomic_file(self.search.scratch / "journal_size") as temporary:
            temporary.write_text(f"{size} {self.search.folder}")
        return None if self.scheduler is None else vars(self.scheduler)

    def set_state(self, state: dict[str, Any]) -> None:
        """Tune calls this when it reads a snapshot, before it adds the trials."""
        vars(self.scheduler).update(state)

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See `tune.Callback`."""
        trial.__class__ = _Trial  # Tune has no other way to choose which errors end a trial.
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
        # A trial that failed may have reported nothing.
        started_at = tune_trial.run_metadata.start_time or time.time()
        # At the start of a trial that is restored, this is the time of its run before.
        seconds = 0.0
        if state != "running":
            seconds = float(result.get("time_total_s", time.time() - started_at))
        number, params = _trial_number(tune_trial), dict(tune_trial.config)
        earlier = self.earlier.get(number)
        if earlier is not None and earlier.params == params:
            seconds += earlier.duration_s
        trial = Trial(
            number=number,
            params=params,
            state=state,
            values={name: float(result[name]) for name in self.search.modes if name in result},
            duration_s=seconds,
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
        if state == "stopped":
            self.search.end_tracking(trial)
        logger.info(
            trial.describe(self.search.num_trials, is_best(trial, others, self.search.modes))
        )


class _Trial(TuneTrial):  # type: ignore[misc]
    """A trial of Tune that is not repeated if its loss diverged, as it would end the same way."""

    def should_recover(self) -> bool:
        """See `tune.experiment.Trial`."""
        return super().should_recover() and not isinstance(_read_error(self), DivergedError)


def _describe_error(trial: Any) -> str:
    """Returns the first line of the error of a trial of Tune."""
    error = _read_error(trial)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _read_error(trial: Any) -> Any:
    """Returns the error of a trial of Tune, without Ray's around it.

    Of the errors of a trial's workers it is that of the first worker.
    """
    if trial.pickled_error_file is None:  # Tune pickles only what a task or an actor raised.
        return SearchError(f"Ray Tune ended the trial, see {trial.error_file}")
    error = pickle.loads(Path(trial.pickled_error_file).read_bytes())
    error = getattr(error, "cause", None) or error
    if failures := getattr(error, "worker_failures", None):
        error = failures[min(failures)]
    return error


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
