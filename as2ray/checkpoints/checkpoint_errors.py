"""Turns what libraries raise for a missing or damaged checkpoint into one error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from as2ray.errors import As2rayError, CheckpointError


@contextmanager
def checkpoint_errors(path: str | Path) -> Iterator[None]:
    """Turns errors of transformers and of files into a `CheckpointError`."""
    try:
        yield
    except As2rayError:
        raise
    except Exception as error:  # transformers raises many types for a missing checkpoint
        cause = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{path} is no checkpoint: {type(error).__name__}: {cause}",
            fix="name a folder with config.json, model.safetensors and a tokenizer, or a hub id; "
            "offline, only hub ids in the cache can be loaded",
        ) from error
