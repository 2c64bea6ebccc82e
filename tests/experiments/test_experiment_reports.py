"""Reports of an experiment: tables, charts and learning curves of what is complete."""

import json
import logging
import os
import platform
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import tiny

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.evaluation.measures import evaluate
from as2ray.experiments.executor import SequentialBackend, git_commit, run_graph
from as2ray.experiments.experiment import Experiment, Finished, _describe_run
from as2ray.experiments.rankers import save_evaluations
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec
from as2ray.experiments.reports import write_reports
from as2ray.experiments.stage import Stage
from as2ray.experiments.store import Store
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import METRICS

MEASURES = ("AP", "RR")
LINES = (
    {"step": 5, "train/loss": 1.0},
    {"step": 10, "epoch": 1, "dev/AP": 0.5, "test/AP": 0.4, "test/RR": 0.1},
    {"step": 20, "epoch": 2, "dev/AP": 0.6, "test/AP": 0.7, "test/RR": 0.2},
    {"step": 30, "epoch": 3, "dev/AP": 0.596, "test/AP": 0.6, "test/RR": 0.4},
)
SHARES = (1.0, 0.3, 0.0)
"""Share of the pairs that are predicted positive, at each evaluation."""


@dataclass(frozen=True, eq=False)
class Trained(Stage):
    """The metrics of a training run, and an evaluation of what it trained."""

    quality: float
    seed: int

    def run(self, context):
        lines = [dict(line) for line in LINES]
        for line, share in zip(lines[1:], SHARES):
            line["test/share_predicted_positive"] = share
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (context.output / METRICS).write_text(text)
        table = tiny.candidates(12)
        noise = np.random.default_rng(self.seed).normal(0, 0.5, table.num_rows)
        scores = self.quality * table["label"].to_numpy() + noise
        result = evaluate(table, scores, MEASURES)
        return {**save_evaluations({"": result}, context.output), "parameters": 2_000_000}


@pytest.fixture
def recipe() -> Recipe:
    table = TableSpec("wikiqa", "test")
    return Recipe(
        title="Tiny",
        model=ModelSpec("bert-base-uncased"),
        tables={name: replace(table) for name in ("target", "dev", "test")},
        dev="dev",
        tests=["test"],
        runs={name: RunSpec(train=["target"]) for name in ("weak", "strong")},
        baseline="weak",
        seeds=[0, 1],
        measures=list(MEASURES),
        plot_learning_curves=True,
        published_results={"test": {"paper": {"AP": 0.75, "parameters": 3_000_000}}},
        reproduces={"test": {"strong": "paper"}},
    )


@pytest.fixture
def finished(tmp_path) -> Finished:
    experiment = Experiment()
    for name, quality in (("weak", 0.0), ("strong", 2.0)):
        for seed in (0, 1):
            stage = experiment.add(f"rankers/{name}-seed{seed}", Trained(quality, seed))
            experiment.compare("test", name, seed, stage)
    store = Store(str(tmp_path / "store"))
    backend = SequentialBackend(store, WorkersConfig(num_workers=0))
    run = run_graph(experiment.targets, store, backend)
    run.raise_failures({})
    (tmp_path / "out").mkdir()
    return Finished(experiment, run, store, tmp_path / "out")


def test_run_is_described_by_its_seeds_machine_and_packages(finished):
    described, now = _describe_run(finished.experiment, "Tiny"), datetime.now(UTC)
    assert timedelta() <= now - datetime.fromisoformat(described["created_at"]) < timedelta(hours=1)
    assert (described["commit"], described["command"]) == (git_commit(), sys.argv)
    assert (described["title"], described["seeds"]) == ("Tiny", [0, 1])
    machine, packages = described["machine"], described["packages"]
    assert (machine["cores"], machine["python"]) == (os.cpu_count(), platform.python_version())
    assert machine.keys() == {"system", "cores", "python", "gpu"}
    assert {"as2ray", "torch", "ray"} <= packages.keys()


@dataclass(frozen=True, eq=False)
class Made(Stage):
    """Something of other stages, with or without weights of its own."""

    name: str
    of: tuple[Stage, ...] = ()
    parameters: int | None = None

    def run(self, context):
        return {} if self.parameters is None else {"parameters": self.parameters}


def test_system_has_the_weights_of_the_rankers_that_it_is_made_of_each_counted_once(tmp_path):
    start = Made("start", (), 100)
    small, large = Made("small", (start,), 1), Made("large", (start,), 10)
    systems = {
        "ranker": small,
        "ensemble": Made("ensemble", (Made("a", (small,)), Made("b", (large, small)))),
        "bm25": Made("bm25"),
        "lost": Made("lost", (small,)),
    }
    experiment = Experiment()
    for system, stage in systems.items():
        experiment.compare("test", system, 0, Made(f"{system} evaluation", (stage,)))
        experiment.compare("other", "elsewhere", 0, large)
    # Of a second seed nothing is counted twice, and of a first one that is lost the second counts.
    experiment.compare("test", "ranker", 1, large)
    experiment.compare("test", "late", 0, systems["lost"])
    experiment.compare("test", "late", 1, large)
    store = Store(str(tmp_path / "store"))
    backend = SequentialBackend(store, WorkersConfig(num_workers=0))
    run = run_graph(experiment.targets, store, backend)
    run.results = {s: r for s, r in run.results.items() if "lost" not in s.name}
    finished = Finished(experiment, run, store, tmp_path)
    assert finished.parameters("test") == {"ranker": 1, "ensemble": 11, "late": 10}
    assert finished.parameters("other") == {"elsewhere": 10}


def test_report_compares_systems_with_the_baseline_and_the_paper(recipe, finished, caplog):
    with caplog.at_level(logging.INFO, "as2ray.experiments.reports"):
        reports = write_reports(recipe, finished)
    report, out = reports["test"], finished.output
    assert (report.title, report.baseline) == ("Tiny: test", "weak")
    rows = {row.system: row for row in report.rows}
    assert [(name, row.seeds, row.parameters) for name, row in rows.items()] == [
        ("weak", (0, 1), 2_000_000),
        ("strong", (0, 1), 2_000_000),
        ("paper", (), 3_000_000),
    ]
    results = finished.evaluations()["test"]["strong"]
    expected = np.mean([result.measures["AP"] for result in results.values()])
    assert rows["strong"].measures["AP"].mean == pytest.approx(expected)
    assert report.reproduces == {"strong": "paper"}
    assert (out / "test.md").read_text().startswith("### Tiny: test")
    assert json.loads((out / "test.json").read_text())["baseline"] == "weak"
    assert (out / "test.png").read_bytes().startswith(b"\x89PNG")
    [record] = [each for each in caplog.records if "### Tiny: test" in each.getMessage()]
    assert str(out / "test.md") in record.getMessage()
    # What is not shown is written all the same.
    caplog.clear()
    (out / "test.md").unlink()
    with caplog.at_level(logging.INFO, "as2ray.experiments.reports"):
        write_reports(recipe, finished, finished.evaluations(), is_shown=False)
    assert not caplog.messages
    assert (out / "test.md").is_file()


def test_learning_curves_and_how_stable_they_are_stand_beside_the_report(recipe, finished):
    write_reports(recipe, finished)
    out = finished.output
    assert {path.name for path in out.iterdir()} == {
        *("test.md", "test.json", "test.png"),
        *("test-curve.png", "test-stability.md", "test-curve-RR.png", "test-stability-RR.md"),
    }
    names = [f"{name}-seed{seed}" for name in ("weak", "strong") for seed in (0, 1)]
    # The last two evaluations are close to the best on dev; two of three predict one label.
    assert (out / "test-stability.md").read_text().splitlines() == [
        "| run | mean change between evaluations | range where dev MAP is within 0.005 | "
        "of evaluations | predict one label |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {name} | 0.2000 | 0.1000 | 2 | 2 |" for name in names),
    ]
    lines = (out / "test-stability-RR.md").read_text().splitlines()
    assert lines[2] == "| weak-seed0 | 0.1500 | 0.2000 | 2 | 2 |"


def test_curves_join_the_seeds_of_a_run_by_epoch(recipe, finished, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "as2ray.evaluation.plots.learning_curve", lambda *arguments: drawn.append(arguments)
    )
    write_reports(replace(recipe, measures=["RR"]), finished)
    assert [(title, axis, measure) for _, title, axis, measure, _ in drawn] == [
        ("Tiny: test", "epoch", "AP"),
        ("Tiny: test", "epoch", "RR"),
    ]
    points = [(1, 0.4), (2, 0.7), (3, 0.6)]
    assert drawn[0][0] == {"weak": points * 2, "strong": points * 2}


def test_test_whose_baseline_is_not_complete_has_no_report(recipe, finished, caplog):
    results = {name: finished.evaluations()["test"]["strong"] for name in ("strong",)}
    assert write_reports(recipe, finished, {"test": results}) == {}
    assert caplog.messages == ["no report of test: its baseline 'weak' is not complete"]
    assert not list(finished.output.iterdir())
    plain = replace(recipe, plot_learning_curves=False, published_results={}, reproduces={})
    assert list(write_reports(plain, finished)) == ["test"]
    by_test = replace(plain, baseline={"test": "strong"})
    assert write_reports(by_test, finished)["test"].baseline == "strong"
    assert not list(finished.output.glob("*curve*"))
