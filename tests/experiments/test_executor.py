import errno
import json
import os
import re
import signal
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
from sleeping_stages import Cell, Failing, runs

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, CorpusError, StaleStageError, TrainingError
from as2ray.experiments.command import exit_with_error
from as2ray.experiments.dry_run import dry_run
from as2ray.experiments.executor import (
    ExperimentError,
    GraphRun,
    SequentialBackend,
    git_commit,
    run_graph,
)
from as2ray.experiments.experiment import Experiment, check_experiment, run_experiment
from as2ray.experiments.stage import NOT_IDENTITY, Stage, critical_paths, sorted_stages
from as2ray.experiments.store import Store
from as2ray.progress import progress_values

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


@dataclass(frozen=True, eq=False)
class Labeled(Stage):
    """Reports what the experiment calls it."""

    number: int

    def run(self, context):
        return {"label": asdict(context.label)}


def test_stage_is_told_its_name_and_the_title_of_the_recipe(store, tmp_path):
    named, unnamed = Labeled(0), Labeled(1)
    run = run_stages(store, named, unnamed, names={named: "cells/a"}, title="Study")
    labels = [run.results[stage].outputs["label"] for stage in (named, unnamed)]
    assert labels == [{"experiment": "Study", "name": name} for name in ("cells/a", "")]
    experiment = Experiment()
    experiment.add("cells/b", stage := Labeled(2))
    backend = SequentialBackend(store, WORKERS)
    finished = run_experiment(
        experiment, tmp_path / "out", store, backend, lambda _: None, title="Other"
    )
    assert finished.outputs(stage)["label"] == {"experiment": "Other", "name": "cells/b"}


def test_manifest_says_of_what_a_stage_was_made_by_what_and_when(store):
    first = Cell("first")
    stage, started_at = Cell("a", (first,), seconds=0.02), datetime.now(UTC)
    results = run_stages(store, stage).results
    manifest = store.manifest("Cell", results[stage].digest)
    assert manifest["inputs"] == stage.identity({first: results[first].fingerprint})
    assert manifest["outputs"] == results[stage].outputs
    assert manifest["workers"] == asdict(WORKERS)
    assert manifest["command"] == sys.argv
    assert manifest["git_commit"] == git_commit()
    assert manifest["packages"].items() >= {p: version(p) for p in ("as2ray", "torch")}.items()
    created_at = datetime.fromisoformat(manifest["created_at"])
    assert timedelta(seconds=-1) <= created_at - started_at <= timedelta(seconds=60)
    assert 0.02 <= manifest["duration_s"] <= 60


def test_progress_tells_which_stage_of_how_many_has_started_and_how_many_are_complete(
    store, caplog
):
    caplog.set_level("INFO", "as2ray.experiments.executor")
    bad, user = Failing("no good"), Cell("user", (Cell("c", seconds=0.02),))
    run_stages(store, Cell("old"))
    caplog.clear()
    names = {bad: "bad", user: "user", user.after[0]: "c"}
    run_stages(store, Cell("old"), bad, user, names=names)
    events = [progress_values(record) for record in caplog.records]
    shown = [
        (each["task"], each["state"], each.get("position"), each.get("num_complete"))
        for each in events
        if "task" in each
    ]
    assert shown == [
        ("bad", "started", 2, None),
        ("bad", "failed", None, None),
        ("c", "started", 3, None),
        ("c", "complete", None, 2),
        ("user", "started", 4, None),
        ("user", "complete", None, 3),
    ]
    assert {each["num_stages"] for each in events if "position" in each} == {4}
    durations = {e["task"]: e["duration_s"] for e in events if e.get("state") == "complete"}
    assert events[-1]["durations_s"] == durations
    assert 0.02 <= durations["c"] <= events[-1]["duration_s"] <= 60


def test_error_of_a_user_is_logged_without_a_traceback_and_a_bug_with_one(store, caplog):
    run_stages(store, Failing("no good\nnor bad"), Failing("by zero", is_bug=True))
    user, bug = [each for each in caplog.records if each.levelname == "ERROR"]
    assert not user.exc_info
    assert bug.exc_info
    assert user.getMessage().endswith("no good")
    assert progress_values(user)["full"].endswith("no good\nnor bad")


def test_what_cannot_run_is_refused_before_a_cluster_is_started(store, tmp_path):
    experiment, output = Experiment(), tmp_path / "output"
    experiment.add("cells/a", Checked("a"))
    experiment.add("cells/b", Checked("b", wrong="no such layer"))
    run_stages(store, Checked("b"))
    check_experiment(experiment, output, store)  # what cannot run is stored
    experiment.add("cells/c", Checked("c", wrong="no such exit"))
    with pytest.raises(ConfigError, match="'cells/c': no such exit"):
        check_experiment(experiment, output, store)
    output.write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        check_experiment(experiment, output, store)


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
    inner, middle, scores = Cell("c"), Cell("b", (Cell("c"),)), Cell("scores")
    target, tested = Cell("a", (middle,)), Cell("tested", (scores,))
    experiment = Experiment()
    experiment.add("table", target)
    experiment.add("again", target)
    experiment.compare("test", "ranker", 3, target)
    experiment.compare("test", "other", 3, tested)
    experiment.compare("test", "other", 4, tested)
    assert experiment.names() == {
        target: "table",
        middle: "Cell for table",
        inner: "Cell for table",
        tested: "other-seed3 on test",
        scores: "Cell for other-seed3 on test",
    }


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
    with pytest.raises(ExperimentError, match=r"2 stages .* first: one; second: two"):
        run.raise_failures(stages)


def test_of_several_failures_only_the_first_lines_are_told_or_their_types():
    failures = {Cell("a"): ConfigError("wrong", fix="correct it"), Cell("b"): MemoryError()}
    with pytest.raises(ExperimentError) as raised:
        GraphRun(failures=failures, skipped=[Cell("c")]).raise_failures({Cell("a"): "first"})
    assert raised.value.problem.endswith(": first: wrong; Cell: MemoryError()")


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


def test_command_that_is_terminated_ends_as_one_that_is_interrupted():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="130"), exit_with_error():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)


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
    assert lines[4:] == ["", "resources: this process"]
    assert runs(log) == ["one"]


@dataclass(frozen=True, eq=False)
class Described(Stage):
    """Is trained with a seed on something, which may be missing."""

    RESOURCES = "gang"

    seed: int
    source: str
    of: Stage | None = None
    problem: str = ""

    def check(self, results):
        if self.problem:
            raise CorpusError(self.problem)

    def describe(self):
        return {"data": self.of, "updates": self.seed // 5, "hours": 1.5, "source": self.source}


def test_dry_run_shows_one_row_for_seeds_that_do_not_differ_what_is_read_and_on_what(store):
    experiment = Experiment()
    for seed in (3, 4, 5):
        start = experiment.add(f"starts/a-seed{seed}", Described(seed, "model a"))
        experiment.add(f"rankers/b-seed{seed}", Described(seed, "", start))
    experiment.add("tables/t", Described(0, "missing: corpus c", problem="no file"))
    experiment.compare("test", "b", 3, Described(1, "model d", problem="no folder"))
    workers = WorkersConfig(num_workers=2, cpus_per_worker=1.0, gpus_per_worker=0.5)
    table, totals, *rest = re.split(r"\n(?=8 stages)|\n\n", dry_run(experiment, store, workers))
    rows = [re.split(" {2,}", line) for line in table.splitlines()]
    described = [dict(zip(rows[0], row)) for row in rows[1:]]
    assert [(row["stage"], row["data"], row["updates"]) for row in described] == [
        ("starts/a-seed3,4", "-", "0"),
        ("rankers/b-seed3,4", "starts/a-seed3,4", "0"),
        ("starts/a-seed5", "-", "1"),
        ("rankers/b-seed5", "starts/a-seed5", "1"),
        ("tables/t", "-", "0"),
        ("b-seed3 on test", "-", "0"),
    ]
    assert {(row["kind"], row["hours"], row["loss"]) for row in described} == {
        ("Described", "1.50", "-")
    }
    assert totals.startswith("8 stages, 0 stored; 0.0 hours on one device")
    assert rest == [
        "reads:\nmodel a\nmissing: corpus c\nmissing: 'b-seed3 on test': no folder\nmodel d",
        "resources: 8 training runs of 2 workers with 1.5 CPU + 0.5 GPU each; as many at the same "
        "time as fit on the cluster",
    ]


class ParallelBackend(SequentialBackend):
    """Runs several stages at a time, each to its end when it is waited for."""

    def __init__(self, store, max_parallel):
        super().__init__(store, WORKERS, max_parallel)
        self.started, self.checked = [], []

    def check(self, stages):
        self.checked += stages

    def admits(self, stage, running):
        return len(running) < self.max_parallel

    def submit(self, stage, inputs, label):
        self.started.append(stage.name)
        return super().submit(stage, inputs, label)


def test_longest_chain_starts_first_and_one_at_a_time_keeps_the_order(tmp_path):
    small = [Cell(f"c{n}", expected_hours=float(n)) for n in range(4)]
    stages = [*small, Cell("last", (Cell("first", expected_hours=2.0),), expected_hours=1.5)]
    for max_parallel, order in ((1, "c0 c1 c2 c3 first last"), (2, "first c3 c2 last c1 c0")):
        backend = ParallelBackend(Store(str(tmp_path / str(max_parallel))), max_parallel)
        run_graph(stages, backend.store, backend)
        assert backend.started == order.split()


def test_nothing_passes_the_head_of_the_queue(store):
    backend = ParallelBackend(store, 9)
    backend.admits = lambda stage, running: not running or stage.name != "large"
    stages = [Cell("large", expected_hours=2.0), Cell("largest", expected_hours=3.0), Cell("small")]
    run_graph(stages, store, backend)
    assert backend.started == ["largest", "large", "small"]


def test_fail_fast_lets_what_runs_end_and_starts_nothing_else(store):
    backend = ParallelBackend(store, 2)
    stages = [Checked("bad"), Cell("beside"), Cell("later")]
    backend.result = lambda run: _fail() if run.args[0] == stages[0] else run()
    run = run_graph(stages, store, backend, fail_fast=True)
    assert backend.started == ["bad", "beside"]
    assert list(run.results) == [stages[1]]
    assert (list(run.failures), run.skipped) == ([stages[0]], [stages[2]])


def _fail():
    raise TrainingError("no good")


def test_plan_is_checked_for_the_stages_that_the_store_does_not_have(store):
    backend, stages = ParallelBackend(store, 2), [Cell("a"), Cell("b")]
    run_graph(stages[:1], store, backend)
    run_graph(stages, store, backend)
    assert backend.checked == stages
    backend.check = None  # nothing is left to check
    assert run_graph(stages, store, backend).results.keys() == set(stages)


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
