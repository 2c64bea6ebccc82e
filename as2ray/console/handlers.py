"""Handlers and formatters of the log: timed lines, bars on a terminal, JSON lines."""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from as2ray.console.digest import MIN_SUMMARY_S, Digest
from as2ray.progress import format_duration, progress_values

TIMED_LINE = ("%(asctime)s  %(message)s", "%H:%M:%S")
"""Format of a line, and of the time in it."""


def timed_lines() -> logging.Formatter:
    """Returns the formatter of lines with their time."""
    return logging.Formatter(*TIMED_LINE)


class FullResults(logging.Formatter):
    """Writes the longer form of results that have one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See `logging.Formatter`."""
        record.message = progress_values(record).get("full", record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, logger, message, and its values."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **progress_values(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes timed lines where there is no terminal, without one for each short stage."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._digest = Digest()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        for each in self._digest.replace(record):
            super().emit(each)

    def close(self) -> None:
        """Writes what is not yet summed up."""
        for each in self._digest.close():
            super().emit(each)
        super().close()


class LogFile(logging.FileHandler):
    """A log file whose folder is made with the first message."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


class BarHandler(logging.Handler):
    """Shows a bar for each piece of work that runs, and messages above the bars.

    Args:
        stream: A terminal.
        shows_steps: Whether messages about single steps are shown beside their bars.
    """

    def __init__(self, stream: TextIO, shows_steps: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.table import Column
        from rich.text import Text

        class Status(ProgressColumn):
            def render(self, task: Any) -> Text:
                unit = task.fields["unit"]
                if task.total is None:
                    return Text(format_duration(task.elapsed or 0.0))
                parts = [f"{task.completed:,.0f}/{task.total:,.0f} {unit}"]
                if task.speed:
                    parts += [f"{task.speed:,.1f}/s"]
                if task.time_remaining is not None:
                    parts.insert(1, f"{format_duration(task.time_remaining)} left")
                # A bar stays one line; of a long one the rate is cut off.
                return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

        super().__init__()
        self._shows_steps, self._digest = shows_steps, Digest()
        self._console = Console(file=stream, markup=False, emoji=False, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=12),
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
            values = progress_values(record)
            name, state = values.get("task"), values.get("state")
            if name is not None:
                self._update(name, values)
            shown = [record]
            if not self._shows_steps:
                is_step = name is not None and state is None
                is_left_out = is_step or record.levelno < logging.INFO
                shown = [] if is_left_out else self._digest.replace(record)
            for each in shown:
                if "durations_s" in progress_values(each):
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
        if values.get("state") in ("complete", "failed", "interrupted"):
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
