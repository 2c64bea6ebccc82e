"""Finds out whether the Hugging Face hub can be reached before its clients try for long."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from socket import create_connection
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import getproxies

HUB_TIMEOUT_S = 3.0
"""Seconds in which the hub must accept a connection."""


def connection_error() -> str | None:
    """Returns why the hub cannot be reached; None if it accepts a connection, or behind a proxy."""
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    if getproxies():
        return None
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        create_connection((str(hub.hostname), port), HUB_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return None


@contextmanager
def offline_without_connection() -> Iterator[None]:
    """Lets `datasets` read its cache alone inside the context, if the hub cannot be reached."""
    import datasets.config
    from huggingface_hub import constants

    with ExitStack() as stack:
        if connection_error() is not None:
            for module in (constants, datasets.config):
                stack.enter_context(_offline(module))
        yield


@contextmanager
def _offline(module: ModuleType) -> Iterator[None]:
    previous = module.HF_HUB_OFFLINE
    module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.HF_HUB_OFFLINE = previous  # type: ignore[attr-defined]
