"""Pauses garbage collection while large libraries are imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_freezes_imports = False


def freeze_imports() -> None:
    """Exempts what is imported, before and from now on, from all later collections, too.

    For processes that run nothing but as2ray: whatever else exists by then is exempt as well.
    Without it the first collection after an import traverses all that was imported.
    """
    global _freezes_imports
    if not _freezes_imports:
        gc.freeze()
    _freezes_imports = True


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables garbage collection inside the context.

    Objects that an import creates stay alive, so collections find nothing. They take a sixth of the
    import time of torch and transformers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _freezes_imports:
            gc.freeze()
        if was_enabled:
            gc.enable()
