"""Saves rankers as checkpoint folders."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from as2ray.checkpoints.gc_pause import gc_paused
from as2ray.tables.atomic import atomic_folder, is_writable

with gc_paused():
    import torch
    from safetensors import SafetensorError

    from as2ray.checkpoints.activation_ranges import save_activation_ranges
    from as2ray.checkpoints.loading import FORMAT_VERSION, MEMBER_PREFIX
    from as2ray.checkpoints.weight_checks import silence_transformers
    from as2ray.errors import CheckpointError, validate_arguments
    from as2ray.models.ensemble import EnsembleRanker
    from as2ray.models.ranker import CONFIG_KEY, Ranker
    from as2ray.text.tokenization import TOKENIZER_SETTINGS, PairTokenizer


@validate_arguments
def check_new_path(path: str | Path) -> Path:
    """Checks, before work begins, that its result can be written to a new folder.

    Raises:
        CheckpointError: The path exists, or it cannot be made: one of its parents is no folder, or
            may not be written to.
    """
    folder = Path(path)
    parent = next(p for p in folder.absolute().parents if os.path.lexists(p))
    if os.path.lexists(folder):
        raise CheckpointError(f"output {path} exists; choose a new folder")
    if not parent.is_dir():
        raise CheckpointError(f"output {path} cannot be a new folder, because {parent} is a file")
    if not is_writable(parent):
        problem = f"output {path} cannot be made, because {parent} may not be written to"
        raise CheckpointError(problem, fix="choose another folder")
    return folder


@validate_arguments
def save(
    ranker: Ranker, folder: str | Path, weights: dict[str, torch.Tensor] | None = None
) -> Path:
    """Saves a ranker atomically; an older checkpoint at the same path is replaced.

    Args:
        ranker: The ranker to save.
        folder: Path of the checkpoint.
        weights: The weights, if the ranker holds only a shard of them (FSDP training).

    Returns:
        The folder.

    Raises:
        CheckpointError: A file exists at the path, or a folder that is no checkpoint.
        OSError: It cannot be written, such as to a full disk.
    """
    folder = Path(folder)
    _check_replaceable(folder)
    with atomic_folder(folder, overwrite=True) as new_folder:
        try:
            _write_checkpoint(ranker, new_folder, weights)
        except SafetensorError as error:  # all other files raise an OSError
            raise OSError(f"{folder} cannot be written: {error}") from error
    return folder


def add_activation_ranges(ranker: Ranker, folder: str | Path) -> None:
    """Adds the ranges of a ranker to the folder that it was loaded from; nothing else changes."""
    for index, member in enumerate(getattr(ranker, "members", [])):
        add_activation_ranges(member, Path(folder) / f"{MEMBER_PREFIX}{index}")
    if ranker.activation_ranges:
        save_activation_ranges(ranker, folder)


def _check_replaceable(folder: Path) -> None:
    """Checks that no data other than a checkpoint would be lost."""
    is_checkpoint = (folder / "config.json").is_file()
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    if os.path.lexists(folder) and not is_checkpoint and not is_empty_folder:
        raise CheckpointError(
            f"{folder} exists and is no checkpoint, so it is not replaced",
            fix="choose another path",
        )


def _write_checkpoint(
    ranker: Ranker, folder: Path, weights: dict[str, torch.Tensor] | None
) -> None:
    settings = {
        **ranker.checkpoint_settings(),
        "format_version": FORMAT_VERSION,
        "calibration": [asdict(calibration) for calibration in ranker.calibration],
        "plain_calibration": [asdict(calibration) for calibration in ranker.plain_calibration],
        "threshold": ranker.threshold,
    }
    if isinstance(ranker, EnsembleRanker):
        (folder / "config.json").write_text(json.dumps({CONFIG_KEY: settings}, indent=2))
        for index, member in enumerate(ranker.members):
            member_folder = folder / f"{MEMBER_PREFIX}{index}"
            member_folder.mkdir()
            _write_checkpoint(member, member_folder, None)
        return
    settings |= {name: getattr(ranker.tokenizer, name) for name in TOKENIZER_SETTINGS}
    setattr(ranker.network.config, CONFIG_KEY, settings)
    if weights is not None:
        weights = {name.removeprefix("network."): tensor for name, tensor in weights.items()}
    with silence_transformers():
        ranker.network.save_pretrained(folder, state_dict=weights)
    if ranker.activation_ranges:
        save_activation_ranges(ranker, folder)
    if ranker.hf_tokenizer is None:
        (folder / "tokenizer.json").write_text(ranker.tokenizer.tokenizer_json, encoding="utf-8")
    else:
        _enable_token_types(ranker.hf_tokenizer, ranker.tokenizer).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors makes files that only their owner can read


def _enable_token_types(hf_tokenizer: Any, pair_tokenizer: PairTokenizer) -> Any:
    """Enables token types in the Hugging Face tokenizer if the ranker reads them.

    Transformers 5 disables ALBERT's by default; without them its scores would differ from ours.
    """
    input_names = hf_tokenizer.model_input_names
    uses_types = bool(pair_tokenizer.encode(["question"], ["candidate"]).token_types.any())
    if uses_types and "token_type_ids" not in input_names:
        input_names = [*input_names, "token_type_ids"]
        hf_tokenizer.model_input_names = input_names
        hf_tokenizer.init_kwargs["model_input_names"] = input_names
    return hf_tokenizer
