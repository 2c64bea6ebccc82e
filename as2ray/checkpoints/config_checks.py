"""Refuses configurations that as2ray would run wrongly, each with the entry that says so."""

from collections.abc import Mapping
from typing import Any

import transformers

from as2ray.errors import CheckpointError
from as2ray.models.encoder.families import FAMILIES
from as2ray.models.ranker import CONFIG_KEY

NEW_SETTINGS = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
}
"""What a checkpoint of the architecture "new" must say to be transformers' `gte`."""


def check_config(name: str, values: Mapping[str, Any]) -> None:
    """Checks the content of a `config.json` before transformers reads it.

    Args:
        name: Name of the checkpoint in the error.
        values: The content.

    Raises:
        CheckpointError: The checkpoint needs code of its own, or its model is no ranker or encoder.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{name}: config.json is no object")
    model_type = values.get("model_type")
    if model_type == "new":
        _check_new(name, values)
        return
    auto_map, architectures = values.get("auto_map"), values.get("architectures") or []
    if model_type not in FAMILIES and auto_map:
        classes = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
        raise CheckpointError(
            f"{name}: model_type={model_type!r} needs the code that auto_map names, "
            f"{sorted(map(str, classes))}, and as2ray runs no remote code"
        )
    if not isinstance(architectures, list):
        raise CheckpointError(f"{name}: architectures={architectures!r} is no list of classes")
    for architecture in map(str, architectures):
        if CONFIG_KEY not in values and not hasattr(transformers, architecture):
            raise CheckpointError(
                f"{name}: architectures={architecture!r} is no class of transformers, and as2ray "
                "runs no remote code; listwise models and heads of their own are not supported"
            )


def _check_new(name: str, values: Mapping[str, Any]) -> None:
    for key, expected in NEW_SETTINGS.items():
        if values.get(key, expected) != expected:
            raise CheckpointError(
                f"{name}: {key}={values[key]!r} of model_type='new' is not in transformers' 'gte'"
            )


def gte_config(values: Mapping[str, Any]) -> Any:
    """Returns the configuration of transformers' `gte` for a checkpoint of the type "new"."""
    ignored = {"model_type", "auto_map", "architectures", *NEW_SETTINGS}
    settings = {key: value for key, value in values.items() if key not in ignored}
    config = transformers.GteConfig(**settings)
    names = values.get("architectures") or []
    config.architectures = [name.replace("New", "Gte", 1) for name in names]
    return config
