"""Pipelines: a recipe's graph and reports, run from Python or from a command line."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from as2ray.console.configuration import console_log, silence_libraries
from as2ray.corpora.registry import all_corpora, get_corpus
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import As2rayError, lookup
from as2ray.experiments.dry_run import dry_run
from as2ray.experiments.executor import Backend, SequentialBackend
from as2ray.experiments.experiment import Experiment, Finished, check_experiment, run_experiment
from as2ray.experiments.recipe import read_recipe
from as2ray.experiments.stage import sorted_stages
from as2ray.experiments.store import Store
from as2ray.experiments.tables import PreparedTable
from as2ray.interrupts import sigterm_interrupts
from as2ray.training.tracking import (
    RunDescription,
    TrackingConfig,
    closing,
    create_servers,
)

R = TypeVar("R")

LOG_FILE = "console.log"
"""File in the output with all that the last runs logged, also what Ray's workers printed."""


@dataclass(frozen=True)
class Pipeline(Generic[R]):
    """How a recipe becomes stages and reports."""

    recipe_type: type[R]
    """Class of the recipe; its fields are flags and keys of the YAML file."""
    build: Callable[[R, Mapping[str, str]], Experiment]
    """Returns the graph of a recipe. Its second argument are the folders of corpora by name."""
    report: Callable[[R, Finished], Any]
    """Writes the reports of what is complete."""

    def prepare(
        self,
        recipe: R,
        output: str | Path,
        data_dirs: Mapping[str, str],
        store: str | Path | None = None,
    ) -> tuple[Experiment, Store]:
        """Returns the graph of a recipe and its store; see `run`."""
        place = Store(str(store or Path(output).resolve().parent / "store"))
        experiment = self.build(recipe, data_dirs)
        _check_data_dirs(data_dirs, experiment)
        return experiment, place

    def run(
        self,
        recipe: R,
        output: str | Path,
        workers: WorkersConfig,
        data_dirs: Mapping[str, str] | None = None,
        *,
        store: str | Path | None = None,
        max_parallel: int | None = None,
        fail_fast: bool = False,
    ) -> Finished:
        """Runs the stages that the store does not have, and writes the reports.

        Args:
            recipe: What to run.
            output: Folder of the reports, and of links to the stages.
            workers: Part of the cluster to use; without workers all stages run in this process.
            data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.
            store: Folder or URI of the stages; by default `store` beside the output.
            max_parallel: Maximum number of stages that run at the same time, on Ray.
            fail_fast: Whether no further stage starts after the first failure.

        Raises:
            As2rayError: The recipe cannot run, the output is of another recipe, or a stage failed.
        """
        experiment, place = self.prepare(recipe, output, data_dirs or {}, store)

        title = getattr(recipe, "title", Path(output).name)
        tracking = getattr(recipe, "tracking", TrackingConfig())

        def report(finished: Finished) -> None:
            self.report(recipe, finished)
            log_reports(tracking, title, finished.output)

        def run_on(backend: Backend) -> Finished:
            return run_experiment(experiment, output, place, backend, report, fail_fast, title)

        if not workers.num_workers:
            return run_on(SequentialBackend(place, workers))
        check_experiment(experiment, output, place)
        from as2ray.distributed.cluster import ray_session
        from as2ray.experiments.ray_backend import RayBackend

        with ray_session():
            return run_on(RayBackend.create(place, workers, max_parallel))

    def command(self, arguments: Sequence[str] | None = None) -> None:
        """Runs the command line of the pipeline; exits with 2 on an error that a user can fix."""
        silence_libraries()
        with exit_with_error():
            recipe, options = read_recipe(self.recipe_type, arguments)
            if options.dry_run:
                os.environ.setdefault("HF_HUB_OFFLINE", "1")
                prepared = self.prepare(recipe, options.output, options.data_dirs, options.store)
                sys.stdout.write(dry_run(*prepared, options.workers) + "\n")
                return
            settings = {n: getattr(options, n) for n in ("store", "max_parallel", "fail_fast")}
            shown = {n: getattr(options, n) for n in ("quiet", "verbose", "json_log")}
            with console_log(**shown, log_file=Path(options.output) / LOG_FILE):
                self.run(recipe, options.output, options.workers, options.data_dirs, **settings)


def _check_data_dirs(data_dirs: Mapping[str, str], experiment: Experiment) -> None:
    """Checks that each folder is that of a corpus, which may be one of the user's own."""
    if not (unknown := sorted(data_dirs.keys() - all_corpora().keys())):
        return
    from as2ray.experiments.indexes import CollectionTexts  # Loading it takes seconds.

    stages = sorted_stages(experiment.targets)
    names = [stage.spec.corpus for stage in stages if isinstance(stage, PreparedTable)]
    names += [stage.corpus for stage in stages if isinstance(stage, CollectionTexts)]
    corpora = map(get_corpus, filter(None, names))
    known = all_corpora() | {corpus.name: corpus for corpus in corpora}
    for name in unknown:
        lookup(known, name, "corpus of data_dirs")


def log_reports(tracking: TrackingConfig, title: str, output: Path) -> None:
    """Stores the reports in MLflow or Weights & Biases, in one run of each output folder."""
    key, folder = f"{output} reports", str(output)
    run = RunDescription("reports", title, key, folder=folder, is_reopened=True)
    trackers = create_servers(tracking, run)
    with closing(trackers):
        for path in sorted(path for path in output.iterdir() if path.is_file()):
            for tracker in trackers:
                tracker.log_file(path)


@contextmanager
def exit_with_error() -> Iterator[None]:
    """Prints an error of the user or of a file inside the block, and exits with status 2.

    After Ctrl-C or SIGTERM it exits with status 130.
    """
    try:
        with sigterm_interrupts():
            yield
    except KeyboardInterrupt as interrupt:
        what = str(interrupt) or "interrupted; run the same command again: it resumes"
        sys.stderr.write(f"{what}\n")
        sys.exit(130)
    except (As2rayError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)
