"""Loading of large libraries, uninterrupted.

Must not know which libraries.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage is collected meanwhile: what a library makes as it is loaded stays, and looking
    through it again and again takes a sixth of the time that torch and transformers need."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
