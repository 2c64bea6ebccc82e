"""The file with the activation ranges of a checkpoint, which int8 needs beside the fp32 weights."""

import json
from pathlib import Path
from typing import Any

from as2ray.checkpoints.gc_pause import gc_paused
from as2ray.tables.atomic import atomic_file

with gc_paused():
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
    from transformers.utils import cached_file

    from as2ray.errors import CheckpointError
    from as2ray.models.encoder.int8 import PRODUCTS, ActivationRanges
    from as2ray.models.ranker import Ranker

FILE_NAME = "activation_ranges.safetensors"
FILE_VERSION = "2"
"""Version of the file; others are refused, but for version 1, which has no unquantized parts."""


def save_activation_ranges(ranker: Ranker, folder: str | Path) -> None:
    """Writes the ranges of a ranker, which is no ensemble, into its folder."""
    tensors = {
        f"encoders.{i}.layers.{j}.{name}": tensor
        for i, ranges in enumerate(ranker.activation_ranges)
        for j, layer in enumerate(ranges.layers)
        for name, tensor in layer.items()
    }
    checksums = ",".join(str(ranges.checksum) for ranges in ranker.activation_ranges)
    unquantized = [sorted(ranges.unquantized_parts) for ranges in ranker.activation_ranges]
    metadata = {
        "version": FILE_VERSION,
        "checksums": checksums,
        "unquantized_parts": json.dumps(unquantized),
    }
    with atomic_file(Path(folder) / FILE_NAME) as path:
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise OSError(f"{FILE_NAME} cannot be written: {error}") from error


def load_activation_ranges(name: str, **options: Any) -> tuple[ActivationRanges, ...]:
    """Reads the ranges of each encoder of a checkpoint; none if it has no such file.

    Args:
        name: A folder or a hub id.
        options: The revision of a hub id, if there is one.

    Raises:
        CheckpointError: The file is damaged, or of another version.
    """
    path = cached_file(
        name,
        FILE_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )
    if path is None:
        return ()
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("version") not in ("1", FILE_VERSION):
            raise CheckpointError(
                f"{name}: {FILE_NAME} has version {metadata.get('version')}, but as2ray reads "
                f"{FILE_VERSION}",
                fix="fit the ranges again with `as2ray quantize`",
            )
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    checksums = metadata["checksums"].split(",")
    unquantized = json.loads(metadata.get("unquantized_parts", "null")) or [[]] * len(checksums)
    encoders = []
    for i, checksum in enumerate(checksums):
        layers: list[dict[str, torch.Tensor]] = []
        while f"encoders.{i}.layers.{len(layers)}.{PRODUCTS[0]}" in tensors:
            prefix = f"encoders.{i}.layers.{len(layers)}"
            layers.append({product: tensors[f"{prefix}.{product}"] for product in PRODUCTS})
        parts = frozenset((layer, part) for layer, part in unquantized[i])
        encoders.append(ActivationRanges(tuple(layers), int(checksum), parts))
    return tuple(encoders)


def check_activation_ranges(ranker: Ranker, path: str | Path) -> None:
    """Checks that the ranges fit the weights, if the ranker uses them.

    Raises:
        CheckpointError: They do not.
        ConfigError: int8 is requested, but the hardware or the ranges are not there.
    """
    if ranker.resolved_dtype != torch.int8:
        return
    problem: str | None = None
    if len(ranker.activation_ranges) != len(ranker.encoders):
        num_encoders = len(ranker.activation_ranges)
        problem = f"they are of {num_encoders} encoders, but it has {len(ranker.encoders)}"
    for encoder, ranges in zip(ranker.encoders, ranker.activation_ranges):
        problem = problem or encoder.ranges_problem(ranges)
    if problem is not None:
        raise CheckpointError(
            f"{path}: its activation ranges do not fit its weights: {problem}",
            fix="fit them again with `as2ray quantize`, or choose another dtype",
        )
