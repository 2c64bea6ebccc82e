"""Leaves Ray's own messages about start and end out of the console of `as2ray serve`."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from as2ray.console.line_stream import LineStream

CHATTER = re.compile(
    r"Token authentication is enabled|Started Serve in namespace|Connecting to existing Serve app"
    r"|SharedRouterLongPollClient|Got KeyboardInterrupt, exiting|Task ServeController\.\w+ failed"
)
"""What a service says that starts and ends as it should. Warnings and errors are shown."""

LOGGERS = ("ray.serve", "ray._private.authentication.authentication_token_setup")
"""Loggers of this process that say some of it; the rest comes from Ray's other processes."""


@contextmanager
def without_chatter() -> Iterator[None]:
    """Hides `CHATTER`, of this process and of Ray's others, inside the context."""
    streams, loggers = (sys.stdout, sys.stderr), [logging.getLogger(name) for name in LOGGERS]
    shown = _Shown(sys.stdout), _Shown(sys.stderr)
    for logger in loggers:
        logger.addFilter(_is_shown)
    sys.stdout, sys.stderr = shown
    try:
        yield
    finally:
        for stream in shown:
            stream.close_line()
        sys.stdout, sys.stderr = streams
        for logger in loggers:
            logger.removeFilter(_is_shown)


class _Shown(LineStream):
    """Passes on what is no chatter."""

    def take(self, line: str) -> None:
        """See `LineStream`."""
        if CHATTER.search(line) is None:
            super().take(line)


def _is_shown(record: logging.LogRecord) -> bool:
    return CHATTER.search(record.getMessage()) is None
