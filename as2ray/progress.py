"""Progress of work: log messages about its start, its steps and its end, and results."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0
"""Minimum seconds between two lines about the same work, where there are no bars."""

_row_counter: ContextVar[Callable[..., None] | None] = ContextVar("row_counter", default=None)


def fields(**values: Any) -> dict[str, Any]:
    """Returns the argument `extra` of a log message about work in progress.

    Bars and JSON lines show the values; other consoles show the message alone.

    Args:
        values: `task` (name of the work), `state` (started, complete, failed), `completed`,
            `total`, `unit`, `duration_s`, and others.
    """
    return {"progress": values}


def progress_values(record: logging.LogRecord) -> Mapping[str, Any]:
    """Returns what `fields` gave a log message; nothing if it is not about work in progress."""
    values: Mapping[str, Any] = getattr(record, "progress", {})
    return values


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

    state = "interrupted"
    row_counter = _row_counter.set(advance if counts_rows else None)
    try:
        yield advance
        state = "complete"
    except Exception:
        state = "failed"
        raise
    finally:
        _row_counter.reset(row_counter)
        seconds = time.monotonic() - started_at
        ended = fields(**about, state=state, duration_s=round(seconds, 2))
        log.info("%s: %s, %s", name, state, format_duration(seconds), extra=ended)


def count_rows(count: int) -> None:
    """Tells the work of this process, if it counts them, that rows were scored or encoded."""
    if (advance := _row_counter.get()) is not None:
        advance(count)
