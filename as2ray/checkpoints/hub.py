"""Checks that a model can be found before transformers looks for it."""

from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from as2ray.errors import CheckpointError, suggest
from as2ray.tables.hub_connection import connection_error


def check_hub(name: str, revision: str | None = None) -> None:
    """Refuses a file at once, and a hub id not in the cache while the hub cannot be reached.

    transformers would try again for half a minute.

    Raises:
        CheckpointError: There is a file, or no folder, no copy in the cache and no hub.
    """
    if Path(name).is_file():
        raise CheckpointError(
            f"{name} is a file, and a checkpoint a folder",
            fix="name the folder with config.json, model.safetensors and a tokenizer",
        )
    if Path(name).exists():
        return
    try:
        is_cached = try_to_load_from_cache(name, "config.json", revision=revision) is not None
    except ValueError as error:  # no id of a repository
        parent = Path(name).absolute().parent
        siblings = [each.name for each in parent.iterdir()] if parent.is_dir() else []
        fix = suggest(Path(name).name, siblings)
        raise CheckpointError(f"{name} is no folder, and no hub id", fix=fix) from error
    if not is_cached and (reason := connection_error()):
        model = name if revision is None else f"{name}@{revision}"
        raise CheckpointError(
            f"{model} is no folder, is not in the cache of the hub, and {constants.ENDPOINT} "
            f"cannot be reached ({reason})",
            fix="name a folder with config.json, model.safetensors and a tokenizer, or connect",
        )
