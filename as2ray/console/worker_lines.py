"""What Ray's workers write on standard error, as if this process had logged it."""

import json
import logging
import re
from contextlib import suppress
from typing import TextIO

from as2ray.console.handlers import BarHandler
from as2ray.console.line_stream import LineStream
from as2ray.progress import fields

log = logging.getLogger(__name__)

_RAY_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\t?\s*(?:INFO|WARNING) \S+\.py:\d+ -- .*")
"""What Ray itself says in the driver; its errors are shown."""

_KILLED_LINE = re.compile(r".*\(raylet\).* failed\. .* it was killed by `ray\.kill`.*")
"""What Ray says of a task whose actor this process has ended, as it does when it is interrupted."""

_WORKER_LINE = re.compile(r"(?:\x1b\[\d+m)?\([^)]*pid=\d+[^)]*\)(?:\x1b\[0m)? (.*)")


class WorkerLines(LineStream):
    """Standard error that logs what Ray's workers write, as if this process had logged it.

    Args:
        stream: Where all other lines go.
        console: Handler that writes to this stream, too.
    """

    def __init__(self, stream: TextIO, console: logging.Handler) -> None:
        super().__init__(stream)
        self._console = console

    def take(self, line: str) -> None:
        """Logs a worker's line, hides one of Ray, and shows any other above the bars."""
        if _RAY_LINE.fullmatch(line) or _KILLED_LINE.fullmatch(line):
            log.debug("%s", line)
            return
        if (match := _WORKER_LINE.fullmatch(line)) is None:
            if isinstance(self._console, BarHandler):
                self._console.print(line)
            else:
                super().take(line)
            return
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # a line that is no object
            values, _ = json.JSONDecoder().raw_decode(match[1])
            about = {k: v for k, v in values.items() if k not in ("time", "level", "message")}
            name, level = about.pop("logger"), logging.getLevelName(values["level"])
            message = "\n".join(filter(None, [values["message"], about.pop("traceback", "")]))
            logging.getLogger(name).log(level, "%s", message, extra=fields(**about))
            return
        log.debug("%s", line)
