"""Starting Ray on a busy machine."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

NUM_RESTARTS = 9


def start_patiently(start: Callable[[], T]) -> T:
    """Starts a node of Ray; again if Ray, which waits for 30 s, gave it up."""
    for _ in range(NUM_RESTARTS):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()
