import io
import json
import logging
import os
import re
import sys
import time
import warnings
from contextlib import redirect_stderr

import pytest
from sleeping_stages import Cell, Failing

from as2ray.cli.main import main
from as2ray.console.configuration import (
    LOGGERS,
    WORKER_VARIABLE,
    console_log,
    log_to_console,
    worker_variables,
)
from as2ray.console.handlers import BarHandler, JsonFormatter
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.store import Store
from as2ray.progress import RESULT, count_rows, fields, format_duration, result, task
from as2ray.training.tracking import ConsoleTracker

log = logging.getLogger("as2ray.test")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    """A terminal of 100 columns."""
    for name, value in {"COLUMNS": "100", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def run_two_stages(tmp_path):
    store = Store(str(tmp_path / "store"))
    first = Cell("first")
    names = {first: "tables/first", Cell("second", (first,)): "second"}
    return run_graph(list(names), store, SequentialBackend(store, WorkersConfig(0)), names)


def worker_line(message, name="as2ray.training", **values):
    """A line of a worker's log as Ray prints it on the driver."""
    record = logging.LogRecord(name, logging.INFO, "", 0, message, (), None)
    record.__dict__.update(values)
    return f"\x1b[36m(RayTrainWorker pid=12, ip=10.0.0.2)\x1b[0m {JsonFormatter().format(record)}\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (200, "3 min 20 s"), (7_500, "2 h 5 min")],
)
def test_duration_is_shown_in_the_unit_that_fits(seconds, text):
    assert format_duration(seconds) == text


def test_log_of_a_file_has_timed_lines_and_one_line_for_short_stages(tmp_path, capsys):
    with console_log():
        run_two_stages(tmp_path)
        log.info("| a report |", extra=RESULT)
        logging.getLogger("other").warning("advice")
        warnings.warn("more advice", stacklevel=1)
    shown = capsys.readouterr()
    assert shown.out == "| a report |\n"
    lines = shown.err.splitlines()
    assert [re.sub(r"\d\.\d s", "N s", line[10:]) for line in lines] == [
        "2 stages: 0 complete, 2 to run",
        "2 short stages: complete (2 of 2), N s",
        "2 of 2 stages complete, N s",
    ]
    assert all(line[:8].count(":") == 2 for line in lines)


def end_stage(name, duration_s, num_complete):
    """Logs the start and the end of a stage of nine."""
    log.info("%s: started", name, extra=fields(task=name, state="started", num_stages=9))
    with task("its inner work"):
        pass
    place = {"num_complete": num_complete, "num_stages": 9, "duration_s": duration_s}
    log.info("%s: complete", name, extra=fields(task=name, state="complete", **place))


def test_long_stage_has_a_line_and_what_runs_inside_a_stage_has_none(tmp_path, capsys):
    path = tmp_path / "console.log"
    with console_log(log_file=path):
        for number, seconds in enumerate((0.5, 40.0, 0.25, 1.0), 1):
            end_stage(f"stage-{number}", seconds, number)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line[10:] for line in lines] == [
        "stage-2: complete; before it 1 short stage, 0.5 s",
        "2 short stages: complete (4 of 9), 1.2 s",
    ]
    written = path.read_text()
    assert written.count(": started") == written.count("complete") == 8


def test_lines_of_stages_are_in_the_order_in_which_they_end(capsys):
    with console_log():
        for number, seconds in enumerate((0.5, 0.25, 40.0, 30.0, 0.1, 20.0), 1):
            end_stage(f"stage-{number}", seconds, number)
    assert [line[10:] for line in capsys.readouterr().err.splitlines()] == [
        "stage-3: complete; before it 2 short stages, 0.8 s",
        "stage-4: complete",
        "stage-6: complete; before it 1 short stage, 0.1 s",
    ]


def test_short_stages_are_summed_up_before_an_error_and_after_a_minute(capsys, monkeypatch):
    with console_log():
        end_stage("a", 0.1, 1)
        end_stage("b", 0.1, 2)
        log.error("no good")
        end_stage("c", 0.1, 3)
        monkeypatch.setattr("as2ray.console.digest.MAX_HELD_S", -1.0)
        end_stage("d", 0.1, 4)
        log.info("next")
    assert [line[10:] for line in capsys.readouterr().err.splitlines()] == [
        "2 short stages: complete (2 of 9), 0.2 s",
        "no good",
        "2 short stages: complete (4 of 9), 0.2 s",
        "next",
    ]


def test_steps_in_a_row_have_one_line_unless_they_evaluate(capsys):
    with console_log():
        tracker = ConsoleTracker("training", 40, 0)
        for step in (10, 20):
            tracker.log(step, {"train/loss": 0.5})
        tracker.log(20, {"dev/AP": 0.75})
    shown = [line[10:].split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["training step 10/40", "training step 20/40"]


@pytest.mark.parametrize("verbose", [False, True])
def test_longer_form_of_a_result_is_for_the_log_file_and_a_verbose_console(
    verbose, tmp_path, capsys
):
    path = tmp_path / "console.log"
    with console_log(verbose=verbose, log_file=path):
        log.info("the best", extra=result("the best\nall others"))
    assert capsys.readouterr().out == ("the best\nall others\n" if verbose else "the best\n")
    assert "the best\nall others\n" in path.read_text()


def test_quiet_console_shows_warnings_and_results(tmp_path, capsys):
    with console_log(quiet=True):
        run_two_stages(tmp_path)
        log.warning("look out")
        log.info("| a report |", extra=RESULT)
    shown = capsys.readouterr()
    assert shown.out == "| a report |\n"
    assert shown.err[10:] == "look out\n"


def test_verbose_console_shows_other_libraries_and_each_step(capsys):
    with console_log(verbose=True), task("scores", 2, "pairs") as advance:
        advance()
        logging.getLogger("other").warning("advice")
    assert "scores: 1 of 2 pairs" in (err := capsys.readouterr().err)
    assert "advice" in err


def test_json_log_has_an_object_for_each_line(tmp_path, capsys):
    with console_log(json_log=True):
        run_two_stages(tmp_path)
        ConsoleTracker("second", 40, 0).log(10, {"train/loss": 0.5})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    started = next(line for line in lines if line.get("state") == "started")
    assert (started["task"], started["position"], started["num_stages"]) == ("tables/first", 1, 2)
    assert lines[-2]["durations_s"].keys() == {"tables/first", "second"}
    assert (lines[-1]["completed"], lines[-1]["total"]) == (10, 40)
    assert lines[-1]["metrics"] == {"train/loss": 0.5}
    assert {"time", "level", "logger", "message"} <= lines[-1].keys()


def test_failed_stage_is_a_line_without_traceback_and_has_no_duration(tmp_path, capsys):
    store, path = Store(str(tmp_path / "store")), tmp_path / "console.log"
    with console_log(log_file=path):
        run_graph([Failing("no good\nline 2")], store, SequentialBackend(store, WorkersConfig(0)))
    err = capsys.readouterr().err
    assert err.splitlines()[2].endswith(": failed: no good")
    assert "failed: no good\nline 2" in path.read_text()
    assert "Traceback" not in err
    assert err.splitlines()[-1][10:].startswith("0 of 1 stages complete")


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_line_tells_whether_work_failed_or_was_interrupted(capsys, error, state):
    with console_log(), pytest.raises(error), task("embeddings"):
        raise error
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"embeddings: {state}, 0.0 s")


def test_console_flags_exclude_each_other():
    with (
        pytest.raises(ConfigError, match="exclude each other"),
        console_log(quiet=True, json_log=True),
    ):
        pass


def test_console_leaves_log_and_environment_as_they_were(tmp_path):
    root, stream = logging.getLogger(), sys.stderr
    before = root.level, list(root.handlers), logging.getLogger("as2ray").level
    with console_log(log_file=tmp_path / "new" / "console.log"):
        assert worker_variables() == {WORKER_VARIABLE: "json"}
        assert sys.stderr is not stream
    assert (root.level, list(root.handlers), logging.getLogger("as2ray").level) == before
    assert sys.stderr is stream
    assert WORKER_VARIABLE not in os.environ


def test_log_of_workers_is_the_log_of_this_process_and_chatter_goes_to_the_file(tmp_path, capsys):
    path = tmp_path / "out" / "console.log"
    with console_log(log_file=path):
        sys.stderr.write(worker_line("step 3/30")[:40])
        sys.stderr.write(worker_line("step 3/30")[40:])
        sys.stderr.write("\x1b[36m(task pid=7)\x1b[0m chatter of a library\n")
        sys.stderr.write("2026-11-26 11:42:46,158\tWARNING worker.py:85 -- chatter of Ray\n")
        sys.stderr.write(
            "\x1b[33m(raylet)\x1b[0m Task _Caller.call failed. There are infinite retries "
            "remaining, so the task will be retried. "
            "Error: The actor is dead because it was killed by `ray.kill`.\n"
        )
        sys.stderr.write("(raylet) Task failed. Error: its worker ran out of memory\n")
        sys.stderr.write("(autoscaler +5s) no node has a GPU\nno end of line")
    err = capsys.readouterr().err
    assert err.splitlines()[0].endswith(f"log: {path}")
    assert err.splitlines()[1][8:] == "  step 3/30"
    assert "chatter" not in err
    assert "_Caller" not in err
    assert "(raylet) Task failed. Error: its worker ran out of memory\n" in err
    assert "(autoscaler +5s) no node has a GPU\n" in err
    assert err.endswith("no end of line")
    assert "chatter of a library" in (written := path.read_text())
    assert "chatter of Ray" in written


def test_worker_whose_lines_are_read_again_writes_each_as_json_once(monkeypatch, capsys):
    monkeypatch.setenv(WORKER_VARIABLE, "json")
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(each, each.handlers, each.propagate, each.level) for each in loggers]
    try:
        log_to_console()
        log_to_console()  # a worker that Ray uses for another task
        log.info("step %d", 3, extra=fields(completed=3))
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    [line] = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["message"], line["completed"]) == ("step 3", 3)


def test_terminal_has_a_bar_for_each_stage_a_closing_line_and_a_summary(terminal, tmp_path):
    with redirect_stderr(terminal), console_log():
        end_stage("long", 6.0, 1)
        run_two_stages(tmp_path)
    shown = terminal.getvalue()
    assert "stage 1 of 2  tables/first" in shown
    assert "long: complete\n" in shown
    assert re.search(r"2 short stages: complete \(2 of 2\), \d\.\d s\n", shown)
    assert "tables/first: started" not in shown
    # One row for both, as they were short.
    assert re.search(r"2 of 2 stages complete, \d\.\d s\n2 stages +\d\.\d s", shown)


def test_bar_of_a_stage_shows_the_steps_of_its_training_in_a_worker(terminal):
    with redirect_stderr(terminal), console_log():
        log.info("x", extra=fields(task="training", state="started", position=3, num_stages=7))
        values = {"task": "training", "completed": 30, "total": 400, "unit": "steps"}
        sys.stderr.write(worker_line("training step 30/400", progress=values))
        deadline = time.monotonic() + 10
        while "30/400 steps" not in terminal.getvalue():  # drawn ten times a second
            assert time.monotonic() < deadline
        log.info("training: complete", extra=fields(task="training", state="complete"))
    shown = terminal.getvalue()
    assert "stage 3 of 7  training" in shown
    assert "training step 30/400" not in shown


def test_bar_is_one_line_on_a_terminal_of_80_columns(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    values = {"task": "embeddings", "total": 3_945, "unit": "sentences"}
    with redirect_stderr(terminal), console_log():
        for completed in (1_218, 3_218):
            log.debug("x", extra=fields(**values, completed=completed))
            time.sleep(0.15)  # drawn ten times a second
        for handler in logging.getLogger().handlers:
            if isinstance(handler, BarHandler):
                handler._progress.refresh()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    drawn = re.split(r"[\r\n]+", plain)
    assert any("3,218/3,945 sentences  " in line and line.endswith("/s") for line in drawn)
    assert {line.partition(" ")[0] for line in drawn if line} == {"embeddings"}


@pytest.mark.parametrize("text", ["2026/11/26 12:05:28 INFO mlflow: tables", "[1, 2]", "{broken"])
def test_worker_line_of_another_library_is_no_message_and_no_error(tmp_path, capsys, text):
    with console_log(log_file=tmp_path / "console.log"):
        sys.stderr.write(f"(TrainController pid=7) {text}\n")
    assert text not in capsys.readouterr().err
    assert text in (tmp_path / "console.log").read_text()


def test_rows_that_models_score_are_counted_by_the_work_that_asks_for_it(capsys):
    count_rows(3)  # nothing counts
    with console_log(verbose=True):
        with task("scores", 10, "pairs", counts_rows=True), task("inner"):
            count_rows(3)
        with task("scores", 10, "pairs", counts_rows=True):
            count_rows(4)
    err = capsys.readouterr().err
    assert "3 of 10" not in err
    assert "scores: 4 of 10 pairs" in err


def test_commands_take_console_flags_without_a_value(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("The whale eats krill.")
    arguments = ["index", str(tmp_path / "a.txt"), "--encoder", "none", "--output"]
    main([*arguments, str(tmp_path / "loud")])
    shown = capsys.readouterr()
    assert "sentences of the documents: complete" in shown.err
    main([*arguments, str(tmp_path / "quiet"), "--quiet"])
    shown = capsys.readouterr()
    assert shown.out.startswith("1 sentences of 1 documents")
    assert not shown.err
