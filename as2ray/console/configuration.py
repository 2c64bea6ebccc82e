"""The log of a process: what its console and its log file show, and what workers write."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from as2ray.console.handlers import (
    TIMED_LINE,
    BarHandler,
    FullResults,
    JsonFormatter,
    LineHandler,
    LogFile,
    timed_lines,
)
from as2ray.console.worker_lines import WorkerLines
from as2ray.errors import ConfigError
from as2ray.progress import progress_values

log = logging.getLogger(__name__)

LOGGERS = ("as2ray", "pipelines", "__main__")
"""Loggers whose messages are shown; of others only errors are, unless the console is verbose."""

WORKER_VARIABLE = "AS2RAY_LOG"
"""Environment variable of workers: with `json` they write lines that the driver reads again."""

SILENCED = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment variables that stop the bars and advice of libraries; the user's own values stay."""


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
            handler.setFormatter(timed_lines())
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
        console.setFormatter(JsonFormatter() if json_log else timed_lines())
    console.setLevel(logging.WARNING if quiet else logging.INFO)
    console.addFilter(lambda record: _is_shown(record, verbose))
    results = logging.StreamHandler(sys.stdout)
    results.addFilter(lambda record: progress_values(record).get("is_result", False))
    if verbose:
        results.setFormatter(FullResults())
    handlers: list[logging.Handler] = [console, results]
    if isinstance(console, BarHandler) or verbose:
        console.setLevel(logging.DEBUG)
    with ExitStack() as stack:
        stack.enter_context(_handlers(handlers))
        stack.enter_context(_variable(WORKER_VARIABLE, "json"))
        sys.stderr = WorkerLines(stream, console)
        stack.callback(setattr, sys, "stderr", stream)
        stack.callback(sys.stderr.close_line)
        if log_file is not None:
            log.info("log: %s", log_file)  # not into the file, which a refused run does not make
            file = LogFile(log_file, delay=True)
            file.setFormatter(FullResults(*TIMED_LINE))
            stack.enter_context(_handlers([file]))
        yield


def _is_shown(record: logging.LogRecord, is_verbose: bool) -> bool:
    if progress_values(record).get("is_result"):
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
