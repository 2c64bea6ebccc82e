"""Progress on standard error: bars on a terminal, timed lines elsewhere, or JSON lines."""

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from as2ray.errors import ConfigError

log = logging.getLogger(__name__)

LOGGERS = ("as2ray", "pipelines", "__main__")
"""Loggers whose messages are shown; of others only errors are, unless the console is verbose."""

WORKER_VARIABLE = "AS2RAY_LOG"
"""Environment variable of workers: with `json` they write lines that the driver reads again."""

LINE_INTERVAL_S = 10.0
"""Minimum seconds between two lines about the same work, where there are no bars."""

MIN_SUMMARY_S = 5.0
"""Stages that took less have no line and no row of their own; one line sums them up."""

MAX_HELD_S = 60.0
"""Seconds after which short stages are summed up, if nothing else makes it time."""

TIMED_LINE = ("%(asctime)s  %(message)s", "%H:%M:%S")
"""Format of a line, and of the time in it."""

SILENCED = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment variables that stop the bars and advice of libraries; the user's own values stay."""

_row_counter: ContextVar[Callable[..., None] | None] = ContextVar("row_counter", default=None)

_RAY_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\t?\s*(?:INFO|WARNING) \S+\.py:\d+ -- .*")
"""What Ray itself says in the driver; its errors are shown."""

_WORKER_LINE = re.compile(r"(?:\x1b\[\d+m)?\([^)]*pid=\d+[^)]*\)(?:\x1b\[0m)? (.*)")


def fields(**values: Any) -> dict[str, Any]:
    """Returns the argument `extra` of a log message about work in progress.

    Bars and JSON lines show the values; other consoles show the message alone.

    Args:
        values: `task` (name of the work), `state` (started, complete, failed), `completed`,
            `total`, `unit`, `duration_s`, and others.
    """
    return {"progress": values}


RESULT = fields(is_result=True)
"""The argument `extra` of a message that is a result: it goes to standard output, alone."""


def result(full: str) -> dict[str, Any]:
    """Returns the argument `extra` of a result with a longer form.

    Args:
        full: What the log file and a verbose console show instead of the message.
    """
    return fields(is_result=True, full=full)


def format_duration(seconds: float) -> str:
    """Returns a duration such as `0.3 s`, `42 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def task(
    name: str, total: int | None = None, unit: str = "", counts_rows: bool = False
) -> Iterator[Callable[..., None]]:
    """Reports work: its start, its progress, and its end with the duration.

    Args:
        name: What is done.
        total: Number of units; None if it is not known.
        unit: Name of the units, in the plural.
        counts_rows: Whether the units are the pairs and sentences that models score and encode in
            this process meanwhile; they are counted without calls.

    Yields:
        A function that is called with the number of units that were completed since, by default 1.
    """
    started_at = told_at = time.monotonic()
    completed = 0
    about = {"task": name, "total": total, "unit": unit}
    log.info("%s: started", name, extra=fields(**about, state="started"))

    def advance(count: int = 1) -> None:
        nonlocal completed, told_at
        completed += count
        now = time.monotonic()
        is_due = now - told_at >= LINE_INTERVAL_S and completed != total
        told_at = now if is_due else told_at
        share = f"{completed:,} {unit}" if total is None else f"{completed:,} of {total:,} {unit}"
        left = (now - started_at) / completed * ((total or completed) - completed)
        text = f"{share}, {format_duration(left)} left" if total else share
        level = logging.INFO if is_due else logging.DEBUG
        log.log(level, "%s: %s", name, text, extra=fields(**about, completed=completed))

    state = "failed"
    row_counter = _row_counter.set(advance if counts_rows else None)
    try:
        yield advance
        state = "complete"
    finally:
        _row_counter.reset(row_counter)
        seconds = time.monotonic() - started_at
        ended = fields(**about, state=state, duration_s=round(seconds, 2))
        log.info("%s: %s, %s", name, state, format_duration(seconds), extra=ended)


def count_rows(count: int) -> None:
    """Tells the work of this process, if it counts them, that rows were scored or encoded."""
    if (advance := _row_counter.get()) is not None:
        advance(count)


def log_to_console() -> None:
    """Configures the log of a worker, which goes to its standard error.

    Of other libraries only warnings appear there, as is Python's default. Where the driver has a
    console, it reads the lines again (`WorkerLines`).
    """
    silence_libraries()
    if os.environ.get(WORKER_VARIABLE) == "json":
        # Not through the root logger: Ray Train's handler has a format that cannot be changed.
        own_handler = logging.StreamHandler()
        own_handler.setFormatter(JsonFormatter())
        for name in LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [own_handler], False
            logger.setLevel(logging.INFO)
        return
    logging.basicConfig()
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in root.handlers:
        # That of Ray Train has none; those of a test have their own.
        if handler.formatter is None or handler.formatter._fmt == logging.BASIC_FORMAT:
            handler.setFormatter(_timed_lines())
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)


def worker_variables() -> dict[str, str]:
    """Returns the environment variables with which workers log to this process's console."""
    value = os.environ.get(WORKER_VARIABLE)
    return {} if value is None else {WORKER_VARIABLE: value}


def silence_libraries() -> None:
    """Stops progress bars and advice of transformers, datasets and the hub's client."""
    for name, value in SILENCED.items():
        os.environ.setdefault(name, value)
    if library := sys.modules.get("transformers"):  # It has read the variables already.
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()


@contextmanager
def console_log(
    *,
    quiet: bool = False,
    verbose: bool = False,
    json_log: bool = False,
    log_file: Path | None = None,
) -> Iterator[None]:
    """Shows the log of as2ray and its workers on standard error, and results on standard output.

    Args:
        quiet: Show warnings and errors alone.
        verbose: Show the log of other libraries and of each step, too.
        json_log: Write one JSON object per line.
        log_file: File that gets everything, also what Ray's workers print.

    Raises:
        ConfigError: More than one of the three is set.
    """
    if quiet + verbose + json_log > 1:
        given = f"quiet={quiet}, verbose={verbose}, json_log={json_log}"
        raise ConfigError(f"{given} exclude each other", fix="set one of them")
    silence_libraries()
    stream = sys.stderr
    console: logging.Handler
    if json_log or (verbose and not stream.isatty()):
        console = logging.StreamHandler(stream)
    elif quiet or not stream.isatty():
        console = LineHandler(stream)
    else:
        console = BarHandler(stream, shows_steps=verbose)
    if not isinstance(console, BarHandler):
        console.setFormatter(JsonFormatter() if json_log else _timed_lines())
    console.setLevel(logging.WARNING if quiet else logging.INFO)
    console.addFilter(lambda record: _is_shown(record, verbose))
    results = logging.StreamHandler(sys.stdout)
    results.addFilter(lambda record: _values(record).get("is_result", False))
    if verbose:
        results.setFormatter(_FullResults())
    handlers: list[logging.Handler] = [console, results]
    if isinstance(console, BarHandler) or verbose:
        console.setLevel(logging.DEBUG)
    if log_file is not None:
        file = _LogFile(log_file, delay=True)
        file.setFormatter(_FullResults(*TIMED_LINE))
        handlers.append(file)
    with ExitStack() as stack:
        stack.enter_context(_handlers(handlers))
        stack.enter_context(_variable(WORKER_VARIABLE, "json"))
        sys.stderr = WorkerLines(stream, console)
        stack.callback(setattr, sys, "stderr", stream)
        stack.callback(sys.stderr.close_line)
        if log_file is not None:
            log.info("log: %s", log_file)
        yield


def _is_shown(record: logging.LogRecord, is_verbose: bool) -> bool:
    if _values(record).get("is_result"):
        return False
    is_own = record.name.split(".")[0] in LOGGERS
    return is_own or is_verbose or record.levelno >= logging.ERROR


@contextmanager
def _handlers(handlers: Sequence[logging.Handler]) -> Iterator[None]:
    """Adds handlers to the root logger, and lets the log of as2ray through to them."""
    root = logging.getLogger()
    levels = {logging.getLogger(name): logging.DEBUG for name in LOGGERS}
    levels[root] = logging.WARNING
    previous = {logger: logger.level for logger in levels}
    logging.captureWarnings(True)
    try:
        for logger, level in levels.items():
            logger.setLevel(level)
        for handler in handlers:
            root.addHandler(handler)
        yield
    finally:
        logging.captureWarnings(False)
        for logger, level in previous.items():
            logger.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = previous


def _timed_lines() -> logging.Formatter:
    return logging.Formatter(*TIMED_LINE)


class _FullResults(logging.Formatter):
    """Writes the longer form of results that have one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See `logging.Formatter`."""
        record.message = _values(record).get("full", record.message)
        return super().formatMessage(record)


def _values(record: logging.LogRecord) -> Mapping[str, Any]:
    values: Mapping[str, Any] = getattr(record, "progress", {})
    return values


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, logger, message, and its values."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_values(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Digest:
    """Chooses what a console shows of stages and steps, and sums up short stages in a line.

    Starts of stages, what runs inside a stage, and steps within `LINE_INTERVAL_S` are left out; the
    log file has them.
    """

    def __init__(self) -> None:
        self._running: set[str] = set()
        self._short: list[logging.LogRecord] = []
        self._shown_at: dict[str, float] = {}

    def replace(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """Returns the records that are shown instead of one; none of them if it is left out."""
        values = _values(record)
        name, state, is_stage = values.get("task", ""), values.get("state"), "num_stages" in values
        if "durations_s" in values or record.levelno >= logging.WARNING:
            self._running.discard(name)
            return [*self.close(), record]
        if state == "started":
            self._running |= {name} if is_stage else set()
            return []
        if state == "complete" and is_stage:
            self._running.discard(name)
            if values["duration_s"] < MIN_SUMMARY_S:
                self._short.append(record)
                is_due = record.created - self._short[0].created > MAX_HELD_S
                return self.close() if is_due else []
        elif state == "complete" and self._running:
            return []
        elif "completed" in values and not _has_evaluation(values):
            if record.created - self._shown_at.get(name, -LINE_INTERVAL_S) < LINE_INTERVAL_S:
                return []
            self._shown_at[name] = record.created
        return [record]

    def close(self) -> list[logging.LogRecord]:
        """Returns the line about the short stages that have none yet."""
        short, self._short = self._short, []
        if len(short) < 2:
            return short
        last, seconds = _values(short[-1]), sum(_values(r)["duration_s"] for r in short)
        progress = f"({last['num_complete']} of {last['num_stages']})"
        text = f"{len(short)} short stages: complete {progress}, {format_duration(seconds)}"
        return [logging.makeLogRecord({**short[-1].__dict__, "msg": text, "args": ()})]


def _has_evaluation(values: Mapping[str, Any]) -> bool:
    return any(not name.startswith(("train/", "speed/")) for name in values.get("metrics", ()))


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes timed lines where there is no terminal, and one line for stages that were short."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._digest = _Digest()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        for each in self._digest.replace(record):
            super().emit(each)

    def close(self) -> None:
        """Writes what is not yet summed up."""
        for each in self._digest.close():
            super().emit(each)
        super().close()


class _LogFile(logging.FileHandler):
    """A log file whose folder is made with the first message."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


class WorkerLines:
    """Standard error that logs what Ray's workers write, as if this process had logged it.

    Args:
        stream: Where all other lines go.
        console: Handler that writes to this stream, too.
    """

    def __init__(self, stream: TextIO, console: logging.Handler) -> None:
        self._stream, self._console, self._line = stream, console, ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Takes text; each line goes where it belongs once it is complete."""
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._take(line)
        return len(text)

    def close_line(self) -> None:
        """Writes what has no end of line yet."""
        if self._line:
            self._stream.write(self._line)
            self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _take(self, line: str) -> None:
        if _RAY_LINE.fullmatch(line):
            log.debug("%s", line)
            return
        if (match := _WORKER_LINE.fullmatch(line)) is None:
            if isinstance(self._console, BarHandler):
                self._console.print(line)
            else:
                self._stream.write(line + "\n")
            return
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # a line that is no object
            values, _ = json.JSONDecoder().raw_decode(match[1])
            about = {k: v for k, v in values.items() if k not in ("time", "level", "message")}
            name, level = about.pop("logger"), logging.getLevelName(values["level"])
            message = "\n".join(filter(None, [values["message"], about.pop("traceback", "")]))
            logging.getLogger(name).log(level, "%s", message, extra=fields(**about))
            return
        log.debug("%s", line)


class BarHandler(logging.Handler):
    """Shows a bar for each piece of work that runs, and messages above the bars.

    Args:
        stream: A terminal.
        shows_steps: Whether messages about single steps are shown beside their bars.
    """

    def __init__(self, stream: TextIO, shows_steps: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.text import Text

        class Status(ProgressColumn):
            def render(self, task: Any) -> Text:
                unit = task.fields["unit"]
                if task.total is None:
                    return Text(format_duration(task.elapsed or 0.0))
                parts = [f"{task.completed:,.0f}/{task.total:,.0f} {unit}"]
                if task.speed:
                    parts += [f"{task.speed:,.1f} {unit}/s"]
                if task.time_remaining is not None:
                    parts += [f"{format_duration(task.time_remaining)} left"]
                return Text("  ".join(parts))

        super().__init__()
        self._shows_steps, self._digest = shows_steps, _Digest()
        self._console = Console(file=stream, markup=False, emoji=False, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            Status(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            speed_estimate_period=600,
        )
        self._bars: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            values = _values(record)
            name, state = values.get("task"), values.get("state")
            if name is not None:
                self._update(name, values)
            shown = [record]
            if not self._shows_steps:
                is_step = name is not None and state is None
                is_left_out = is_step or record.levelno < logging.INFO
                shown = [] if is_left_out else self._digest.replace(record)
            for each in shown:
                if "durations_s" in _values(each):
                    self._print_summary(each.getMessage(), values["durations_s"])
                else:
                    self.print(self.format(each))
        except Exception:
            self.handleError(record)

    def print(self, text: str) -> None:
        """Prints text above the bars."""
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Removes the bars, and prints what is not yet summed up."""
        self._progress.stop()
        for each in self._digest.close():
            self.print(self.format(each))
        super().close()

    def _update(self, name: str, values: Mapping[str, Any]) -> None:
        if values.get("state") in ("complete", "failed"):
            if name in self._bars:
                self._progress.remove_task(self._bars.pop(name))
            if not self._bars:
                self._progress.stop()
            return
        if name not in self._bars:
            position = values.get("position")
            title = f"stage {position} of {values['num_stages']}  {name}" if position else name
            self._bars[name] = self._progress.add_task(title, total=None, unit="")
            self._progress.start()
        changes = {key: values[key] for key in ("completed", "total", "unit") if key in values}
        self._progress.update(self._bars[name], **changes)

    def _print_summary(self, title: str, durations_s: Mapping[str, float]) -> None:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        shown = {name: s for name, s in durations_s.items() if s >= MIN_SUMMARY_S}
        if rest := [s for name, s in durations_s.items() if name not in shown]:
            shown[f"{len(rest)} {'others' if shown else 'stages'}"] = sum(rest)
        for name, seconds in shown.items():
            table.add_row(name, format_duration(seconds))
        self.print(title)
        self._console.print(table)
