"""Trials of a hyperparameter search: their lines in the log, their table and their plots."""

import csv
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

JOURNAL, STUDY = "optuna.journal", "search"
"""Optuna's storage in the folder of a search, which `optuna-dashboard` can show, and its study."""

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
    """With that of its run in a search that was interrupted, if the run had ended there."""
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


class Journal(JournalFileBackend):
    """Optuna's journal with a single writer: no lock, and no wait for the disk at every entry."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """See `JournalFileBackend`."""
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs))


def is_best(trial: Trial, others: list[Trial], modes: Mapping[str, str]) -> bool:
    """Returns whether a finished trial is better than all others; always False for two measures."""
    if len(modes) != 1 or trial.state != "finished":
        return False
    [(name, mode)] = modes.items()
    sign = 1 if mode == "max" else -1
    values = [sign * other.values[name] for other in others if other.state == "finished"]
    return sign * trial.values[name] > max(values, default=float("-inf"))


def write_reports(trials: list[Trial], folder: Path) -> None:
    """Writes the table of trials as CSV and as Markdown, and plots, into the folder of a search."""
    from as2ray.evaluation.report import markdown_table

    rows = [
        {"trial": trial.number, "state": trial.state, **trial.values, "epoch": trial.epoch}
        | {"seconds": round(trial.duration_s, 2), **trial.params}
        for trial in trials
    ]
    rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "trials.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    cells = [[_format(row.get(name, "")) for name in columns] for row in rows]
    (folder / "search.md").write_text(markdown_table(columns, cells) + "\n")
    storage = JournalStorage(Journal(str(folder / JOURNAL)))
    _draw(optuna.load_study(study_name=STUDY, storage=storage), folder)


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


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
