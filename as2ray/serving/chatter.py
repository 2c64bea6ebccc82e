"""Leaves Ray's own messages about start and end out of the console of `as2ray serve`."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

CHATTER = re.compile(
    r"Token authentication is enabled|Started Serve in namespace|Connecting to existing Serve app"
    r"|SharedRouterLongPollClient|Got KeyboardInterrupt, exiting"
)
"""What this process says of a service that starts and ends as it should."""

LOGGERS = ("ray.serve", "ray._private.authentication.authentication_token_setup")


@contextmanager
def without_chatter() -> Iterator[None]:
    """Hides `CHATTER` of this process inside the context."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(_is_shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return CHATTER.search(record.getMessage()) is None
