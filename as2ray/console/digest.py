"""The choice of what a console shows of stages and steps."""

import logging
from collections.abc import Mapping
from typing import Any

from as2ray.progress import LINE_INTERVAL_S, format_duration, progress_values

MIN_SUMMARY_S = 5.0
"""Stages that took less have no line and no row of their own; the next line sums them up."""

MAX_HELD_S = 60.0
"""Seconds after which short stages are summed up, if nothing else makes it time."""


class Digest:
    """Chooses what a console shows of stages and steps, in the order in which they end.

    Short stages are summed up in the line of the next longer one, or in a line of their own. Starts
    of stages, what runs inside a stage, and steps within `LINE_INTERVAL_S` are left out; the log
    file has them.
    """

    def __init__(self) -> None:
        self._running: set[str] = set()
        self._short: list[logging.LogRecord] = []
        self._shown_at: dict[str, float] = {}

    def replace(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """Returns the records that are shown instead of one; none of them if it is left out."""
        values = progress_values(record)
        name, state, is_stage = values.get("task", ""), values.get("state"), "num_stages" in values
        if "durations_s" in values or record.levelno >= logging.WARNING:
            self._running.discard(name)
            return [*self.close(), record]
        if state == "started":
            self._running |= {name} if is_stage else set()
            return []
        if state == "complete" and is_stage:
            self._running.discard(name)
            return self._end_stage(record)
        if state == "complete" and self._running:
            return []
        if "completed" in values and not _has_evaluation(values):
            if record.created - self._shown_at.get(name, -LINE_INTERVAL_S) < LINE_INTERVAL_S:
                return []
            self._shown_at[name] = record.created
        return [record]

    def close(self) -> list[logging.LogRecord]:
        """Returns the line about the short stages that have none yet."""
        if len(self._short) < 2:
            short, self._short = self._short, []
            return short
        record = self._short[-1]
        place = "({num_complete} of {num_stages})".format(**progress_values(record))
        count, seconds = self._take_short()
        text = f"{count} short stages: complete {place}, {format_duration(seconds)}"
        return [_with_text(record, text)]

    def _end_stage(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """Holds a short stage; a longer one is shown with the short ones that ended before it."""
        if progress_values(record)["duration_s"] < MIN_SUMMARY_S:
            self._short.append(record)
            is_due = record.created - self._short[0].created > MAX_HELD_S
            return self.close() if is_due else []
        count, seconds = self._take_short()
        if not count:
            return [record]
        stages = "1 short stage" if count == 1 else f"{count} short stages"
        text = f"{record.getMessage()}; before it {stages}, {format_duration(seconds)}"
        return [_with_text(record, text)]

    def _take_short(self) -> tuple[int, float]:
        short, self._short = self._short, []
        return len(short), sum(progress_values(each)["duration_s"] for each in short)


def _with_text(record: logging.LogRecord, text: str) -> logging.LogRecord:
    return logging.makeLogRecord({**record.__dict__, "msg": text, "args": ()})


def _has_evaluation(values: Mapping[str, Any]) -> bool:
    return any(not name.startswith(("train/", "speed/")) for name in values.get("metrics", ()))
