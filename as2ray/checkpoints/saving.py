"""Rankers written as checkpoint folders, complete or not at all."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from as2ray.checkpoints.gc_pause import gc_paused

with gc_paused():
    import torch

    from as2ray.checkpoints.loading import MEMBER_PREFIX
    from as2ray.checkpoints.weight_checks import silence_transformers
    from as2ray.errors import CheckpointError
    from as2ray.models.ensemble import EnsembleRanker
    from as2ray.models.ranker import CONFIG_KEY, Ranker
    from as2ray.text.tokenization import PairTokenizer


def check_new_path(path: str | Path) -> Path:
    """A place where nothing lies yet: asked before the work whose result is to go there.

    Raises:
        CheckpointError: Something lies there, or no folder can.
    """
    folder = Path(path)
    above = next(place for place in folder.absolute().parents if os.path.lexists(place))
    if os.path.lexists(folder) or not above.is_dir():
        raise CheckpointError(
            f"output {path}, where {folder if above.is_dir() else above} lies"
            "; expected a new folder: nothing that lies there is overwritten",
            fix="choose another name, or move what lies there away",
        )
    return folder


def save(
    ranker: Ranker, folder: str | Path, weights: dict[str, torch.Tensor] | None = None
) -> Path:
    """Writes a checkpoint, whole or not at all; an older one of the same name is replaced.

    Args:
        ranker: What to write.
        folder: Where to.
        weights: The ranker's weights where they do not lie in it whole (sharded training).

    Raises:
        CheckpointError: A file lies there, or a folder of something else.
    """
    folder, number = Path(folder), uuid4().hex[:8]
    _check_replaceable(folder)
    new, old = (folder.with_name(f".{folder.name}-{which}-{number}") for which in ("new", "old"))
    try:
        new.mkdir(parents=True)
        _write_checkpoint(ranker, new, weights)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _check_replaceable(folder: Path) -> None:
    """Refuses to replace what is no checkpoint: it would be lost."""
    if folder.is_dir():
        fine = (folder / "config.json").is_file() or not any(folder.iterdir())
    else:
        fine = not os.path.lexists(folder)
    if not fine:
        raise CheckpointError(
            f"a checkpoint for {folder}, where something else lies"
            "; expected nothing, an empty folder, or a checkpoint, which is replaced",
            fix="choose another name, or move what lies there away",
        )


def _write_checkpoint(
    ranker: Ranker, folder: Path, weights: dict[str, torch.Tensor] | None
) -> None:
    if isinstance(ranker, EnsembleRanker):
        calibration = [asdict(calibration) for calibration in ranker.calibration]
        told = {
            "ranker": "ensemble",
            "weights": ranker.weights,
            "calibration": calibration,
            "threshold": ranker.threshold,
        }
        (folder / "config.json").write_text(json.dumps({CONFIG_KEY: told}, indent=2))
        for number, member in enumerate(ranker.members):
            (folder / f"{MEMBER_PREFIX}{number}").mkdir()
            _write_checkpoint(member, folder / f"{MEMBER_PREFIX}{number}", None)
        return
    settings = {**ranker.checkpoint_settings(), **_length_settings(ranker.tokenizer)}
    settings["calibration"] = [asdict(calibration) for calibration in ranker.calibration]
    settings["threshold"] = ranker.threshold
    setattr(ranker.network.config, CONFIG_KEY, settings)
    if weights is not None:
        weights = {name.removeprefix("network."): tensor for name, tensor in weights.items()}
    with silence_transformers():
        ranker.network.save_pretrained(folder, state_dict=weights)
    if ranker.hf_tokenizer is None:
        (folder / "tokenizer.json").write_text(ranker.tokenizer.tokenizer_json, encoding="utf-8")
    else:
        _enable_token_types(ranker.hf_tokenizer, ranker.tokenizer).save_pretrained(folder)


def _enable_token_types(hf_tokenizer: Any, pair_tokenizer: PairTokenizer) -> Any:
    """The published tokenizer, told to give token types where the ranker reads them.

    Transformers 5 leaves ALBERT's out by default; its scores would then differ from ours.
    """
    names = hf_tokenizer.model_input_names
    read = bool(pair_tokenizer.encode(["question"], ["candidate"]).token_types.any())
    if read and "token_type_ids" not in names:
        names = [*names, "token_type_ids"]
        hf_tokenizer.model_input_names = hf_tokenizer.init_kwargs["model_input_names"] = names
    return hf_tokenizer


def _length_settings(tokenizer: PairTokenizer) -> dict[str, int]:
    return {"max_length": tokenizer.max_length, "max_question": tokenizer.max_question_length}
