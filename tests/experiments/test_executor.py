import errno
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from sleeping_stages import Cell, Failing, runs

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, StaleStageError, TrainingError
from as2ray.experiments.command import exit_with_error
from as2ray.experiments.dry_run import dry_run
from as2ray.experiments.executor import ExperimentError, SequentialBackend, run_graph
from as2ray.experiments.experiment import Experiment, run_experiment
from as2ray.experiments.stage import NOT_IDENTITY, Stage, critical_paths, sorted_stages
from as2ray.experiments.store import Store

WORKERS = WorkersConfig(num_workers=0)


@pytest.fixture
def log(tmp_path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))


def run_stages(store, *targets, **options):
    return run_graph(targets, store, SequentialBackend(store, WORKERS), **options)


def run_named(store, output, experiment, reports=None):
    backend = SequentialBackend(store, WORKERS)
    write = (lambda _: None) if reports is None else reports.append
    return run_experiment(experiment, output, store, backend, write)


def test_stages_run_once_inputs_first_in_the_given_order(store, log):
    first = Cell("first", log=str(log))
    targets = [Cell("b", (first,), log=str(log)), Cell("a", (first,), log=str(log))]
    run = run_stages(store, *targets)
    assert runs(log) == ["first", "b", "a"]
    again = run_stages(store, *targets)
    assert runs(log) == ["first", "b", "a"]
    assert again.results == run.results


def test_reports_are_written_into_an_output_that_describes_its_run(store, log, tmp_path):
    experiment, files = Experiment(), []
    experiment.add("cells/a", Cell("a", log=str(log)))

    def list_files(finished):
        files.extend(path.name for path in finished.output.iterdir() if path.is_file())

    run_experiment(
        experiment, tmp_path / "out", store, SequentialBackend(store, WORKERS), list_files
    )
    assert sorted(files) == ["opened_stages.txt", "run.json", "stages.json"]


@dataclass(frozen=True, eq=False)
class FailingDisk(Stage):
    """Writes to a disk that refuses it."""

    error: int
    path: str

    def run(self, context):
        raise OSError(self.error, os.strerror(self.error), self.path)


def test_store_that_is_full_or_of_another_user_is_an_error_that_names_it(store):
    for error, path in ((errno.ENOSPC, "/tmp/a"), (errno.EACCES, f"{store.uri}/a")):
        run = run_stages(store, FailingDisk(error, path))
        problem = rf"nothing can be written into {re.escape(store.uri)}: .* {os.strerror(error)}"
        with pytest.raises(ConfigError, match=problem):
            run.raise_failures({})
    with pytest.raises(PermissionError):  # of a file elsewhere
        run_stages(store, FailingDisk(errno.EACCES, "/data/a")).raise_failures({})


def test_lease_that_a_full_disk_does_not_take_keeps_nobody_waiting(store, log, monkeypatch):
    def full(path: Path, _: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert run_stages(store, Cell("a", log=str(log))).failures
    assert not [path for path in Path(store.uri).rglob("*") if path.is_file()]


def test_equal_stages_of_two_recipes_are_one_whoever_made_them(store, log):
    run_stages(store, Cell("a", (Cell("shared", log=str(log)),), log=str(log)))
    run_stages(store, Cell("b", (Cell("shared", log=str(log)),), log=str(log)))
    assert runs(log) == ["shared", "a", "b"]


def test_stages_without_a_name_are_named_by_the_named_one_that_uses_them():
    target = Cell("a", (Cell("b", (Cell("c"),)),))
    experiment = Experiment()
    experiment.add("table", target)
    assert sorted(experiment.names().values()) == ["Cell for table", "Cell for table", "table"]


def test_place_and_log_are_no_identity_but_fields_and_inputs_are():
    stage = Cell("a")
    assert stage == Cell("a", seconds=3.0, log="/tmp")
    assert len({stage, Cell("a", log="/tmp"), Cell("b"), Cell("a", (Cell("b"),))}) == 3


def test_tables_of_equal_content_give_one_user(store):
    @dataclass(frozen=True, eq=False)
    class Table(Stage):
        description: str

        def run(self, context):
            return {"content": "same rows"}

    @dataclass(frozen=True, eq=False)
    class User(Stage):
        table: Stage

        def run(self, context):
            return {}

    users = [User(Table("one way")), User(Table("another way"))]
    results = run_stages(store, *users).results
    assert users[0].key != users[1].key
    assert results[users[0]].digest == results[users[1]].digest


def test_failure_skips_the_users_of_the_stage_and_no_other(store, log):
    failing = Failing("no good")
    user, other = Cell("user", (failing,), log=str(log)), Cell("other", log=str(log))
    run = run_stages(store, user, other)
    assert runs(log) == ["other"]
    assert run.skipped == [user]
    with pytest.raises(TrainingError, match="no good"):
        run.raise_failures({})


def test_several_failures_are_told_by_name(store):
    stages = {Failing("one"): "first", Failing("two", is_bug=True): "second"}
    run = run_stages(store, *stages)
    with pytest.raises(ExperimentError, match="first: one; second: two"):
        run.raise_failures(stages)


def test_fail_fast_starts_nothing_after_a_failure(store, log):
    run = run_stages(store, Failing("no good"), Cell("later", log=str(log)), fail_fast=True)
    assert not runs(log)
    assert len(run.skipped) == 1


@dataclass(frozen=True, eq=False)
class Checked(Cell):
    wrong: str | None = field(default=None, metadata=NOT_IDENTITY)

    def check(self, results):
        if self.wrong:
            raise ConfigError(self.wrong)

    def verify(self, result):
        if self.wrong:
            raise StaleStageError(self.wrong)


def test_what_cannot_run_is_refused_before_anything_starts(store, log):
    stages = [Cell("good", log=str(log)), Checked("bad", wrong="no such layer")]
    with pytest.raises(ConfigError, match="no such layer"):
        run_stages(store, *stages)
    assert not runs(log)


def test_changed_source_of_a_complete_stage_is_refused_before_anything_starts(store, log):
    run_stages(store, Checked("table"))
    with pytest.raises(StaleStageError, match="changed"):
        run_stages(store, Cell("other", log=str(log)), Checked("table", wrong="changed"))
    assert not runs(log)


def test_interrupted_stage_goes_on_with_what_it_has_written(store):
    attempts = []

    @dataclass(frozen=True, eq=False)
    class Interrupted(Stage):
        def run(self, context):
            attempts.append((context.scratch / "half").exists())
            context.scratch.mkdir(parents=True, exist_ok=True)
            (context.scratch / "half").touch()
            if len(attempts) == 1:
                raise KeyboardInterrupt
            (context.output / "whole").touch()

    stage = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_stages(store, stage)
    folder = store.work_folder(stage.kind, stage.key)
    assert [path.name for path in folder.iterdir()] == ["scratch"]
    run_stages(store, stage)
    assert attempts == [False, True]
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "whole"}


def test_command_that_is_interrupted_says_in_a_line_that_it_resumes(capsys):
    for error, message in (
        (KeyboardInterrupt(), "interrupted; run the same command again: it resumes\n"),
        (KeyboardInterrupt("after 1 of 2 trials"), "after 1 of 2 trials\n"),
    ):
        with pytest.raises(SystemExit, match="130"), exit_with_error():
            raise error
        assert capsys.readouterr().err == message


def test_output_links_its_stages_and_another_recipe_under_it_is_refused(store, tmp_path, log):
    experiment, output = Experiment(), tmp_path / "output"
    experiment.add("cells/a", Cell("a", log=str(log)))
    run_named(store, output, experiment)
    assert (output / "cells" / "a" / "numbers.npy").exists()
    links = json.loads((output / "stages.json").read_text())
    assert links["cells/a"]["digest"] == (output / "cells" / "a").resolve().name

    changed = Experiment()
    changed.add("cells/new", Cell("new", log=str(log)))
    changed.add("cells/a", Cell("b", log=str(log)))
    with pytest.raises(StaleStageError, match=r"cells/a is of another recipe.*name: 'a' -> 'b'"):
        run_named(store, output, changed)
    assert runs(log) == ["a"]
    run_named(store, tmp_path / "other", changed)
    assert runs(log) == ["a", "new", "b"]


def test_output_that_is_a_file_is_refused(store, tmp_path, log):
    experiment, output = Experiment(), tmp_path / "output"
    experiment.add("cells/a", Cell("a", log=str(log)))
    output.write_text("mine")
    with pytest.raises(ConfigError, match=r"output=.*output is a file"):
        run_named(store, output, experiment)
    assert output.read_text() == "mine"
    assert runs(log) == []


def test_key_of_an_unnamed_input_that_differs_is_told_as_itself(store, tmp_path):
    for name in ("before", "after"):
        experiment = Experiment()
        experiment.add("cells/a", Cell("a", (Cell(name),)))
        if name == "before":
            run_named(store, tmp_path / "output", experiment)
            continue
        with pytest.raises(StaleStageError, match="name: 'before' -> 'after'"):
            run_named(store, tmp_path / "output", experiment)


def test_reports_are_written_of_what_is_complete_before_the_error_is_raised(store, tmp_path):
    experiment, reports = Experiment(), []
    experiment.add("bad", Failing("no good"))
    experiment.add("good", Cell("good"))
    with pytest.raises(TrainingError):
        run_named(store, tmp_path / "output", experiment, reports)
    [finished] = reports
    assert list(finished.named("")) == ["good"]
    # Its files can be looked at, and it is not complete.
    assert [path.name for path in (tmp_path / "output" / "bad").iterdir()] == []
    assert json.loads((tmp_path / "output" / "stages.json").read_text()).keys() == {"good"}


def test_dry_run_lists_what_is_stored_and_runs_nothing(store, tmp_path, log):
    experiment = Experiment()
    experiment.add("one", Cell("one", log=str(log)))
    experiment.add("two", Cell("two", (Cell("one"),), log=str(log), expected_hours=2.5))
    run_stages(store, Cell("one", log=str(log)))
    lines = dry_run(experiment, store, WORKERS).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["one", "two"]
    assert lines[1].endswith("stored")
    assert lines[2].endswith("to run")
    assert "2 stages, 1 stored; 2.5 hours" in lines[3]
    assert runs(log) == ["one"]


def test_longest_chain_is_the_sum_of_its_hours():
    first = Cell("first", expected_hours=1.0)
    middle = Cell("middle", (first,), expected_hours=2.0)
    stages = [Cell("last", (middle,), expected_hours=4.0), replace(first, name="short")]
    hours = critical_paths(sorted_stages(stages))
    assert [hours[s] for s in (first, middle, *stages)] == [7.0, 6.0, 4.0, 1.0]


def test_key_that_one_of_the_two_does_not_have_is_told(store, tmp_path):
    experiment, output = Experiment(), tmp_path / "output"
    experiment.add("cells/a", Cell("a"))
    run_named(store, output, experiment)
    links = json.loads((output / "stages.json").read_text())
    del links["cells/a"]["inputs"]["name"]  # as if an earlier version had not known it
    links["cells/a"]["inputs"]["gone"] = 1  # as if it had known another
    (output / "stages.json").write_text(json.dumps(links))
    with pytest.raises(StaleStageError, match=r"2 keys differ.*gone: 1 -> None; name: None -> 'a'"):
        run_named(store, output, experiment)


def test_digest_does_not_depend_on_the_order_of_keys():
    @dataclass(frozen=True, eq=False)
    class Configured(Stage):
        options: dict[str, int]

    assert Configured({"a": 1, "b": 2}).key == Configured({"b": 2, "a": 1}).key
    assert Configured({"a": 1, "b": 2}).key != Configured({"a": 2, "b": 1}).key
