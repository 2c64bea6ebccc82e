"""Checks that a model can be found before transformers looks for it."""

from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache

from as2ray.errors import CheckpointError, suggest

HUB_TIMEOUT_S = 3.0
"""Seconds in which the hub must accept a connection."""


def check_hub(name: str, revision: str | None = None) -> None:
    """Refuses a hub id at once that is not in the cache while the hub cannot be reached.

    transformers would try again for half a minute.

    Raises:
        CheckpointError: There is no folder, no copy in the cache and no hub.
    """
    if Path(name).exists():
        return
    try:
        is_cached = try_to_load_from_cache(name, "config.json", revision=revision) is not None
    except ValueError as error:  # no id of a repository
        parent = Path(name).absolute().parent
        siblings = [each.name for each in parent.iterdir()] if parent.is_dir() else []
        fix = suggest(Path(name).name, siblings)
        raise CheckpointError(f"{name} is no folder, and no hub id", fix=fix) from error
    if is_cached or (getproxies() and not is_offline_mode()):
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        if is_offline_mode():
            raise OSError("HF_HUB_OFFLINE is set")
        port = hub.port or {"http": 80}.get(hub.scheme, 443)
        create_connection((str(hub.hostname), port), HUB_TIMEOUT_S).close()
    except OSError as error:
        model = name if revision is None else f"{name}@{revision}"
        raise CheckpointError(
            f"{model} is no folder, is not in the cache of the hub, and {constants.ENDPOINT} "
            f"cannot be reached ({error})",
            fix="name a folder with config.json, model.safetensors and a tokenizer, or connect",
        ) from error
