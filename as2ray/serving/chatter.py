"""Leaves Ray's own messages about start and end out of the console of `as2ray serve`."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from as2ray.console.line_stream import LineStream

CHATTER = re.compile(
    r"Token authentication is enabled|Started Serve in namespace|Connecting to existing Serve app"
    r"|SharedRouterLongPollClient|Got KeyboardInterrupt, exiting"
    r"|Cancelling request that has already been assigned to a replica"
    r"|Task ServeController\.\w+ failed.*killed by `ray\.kill`"
)
"""What Ray's processes say of a service that starts and ends as it should, of clients that leave,
and of late pings."""

LOGGERS = ("ray.serve", "ray._private.authentication.authentication_token_setup")


@contextmanager
def without_chatter() -> Iterator[None]:
    """Hides `CHATTER` of this process, and of those whose lines it shows, inside the context."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(_is_shown)
    # Ray writes errors of its actors to the standard output.
    output, errors = _ChatterFilter(sys.stdout), _ChatterFilter(sys.stderr)
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            yield
    finally:
        output.close_line()
        errors.close_line()
        for logger in loggers:
            logger.removeFilter(_is_shown)


class _ChatterFilter(LineStream):
    def take(self, line: str) -> None:
        if not CHATTER.search(line):
            super().take(line)


def _is_shown(record: logging.LogRecord) -> bool:
    return CHATTER.search(record.getMessage()) is None
