"""Checkpoints: a folder with `config.json`, `model.safetensors` and a tokenizer, or a hub id.

Knows files and which class reads which checkpoint. Must not know training or Ray.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from as2ray.checkpoints.gc_pause import gc_paused

with gc_paused():
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from as2ray.checkpoints.weight_checks import check_loaded_weights, silence_transformers
    from as2ray.errors import As2rayError, CheckpointError, ConfigError
    from as2ray.models.calibration import Calibration
    from as2ray.models.cascade import CascadeNetwork, CascadeRanker
    from as2ray.models.encoder.encoder import MODEL_TYPES, max_sequence_length
    from as2ray.models.ensemble import EnsembleRanker
    from as2ray.models.pointwise import PointwiseRanker
    from as2ray.models.ranker import CONFIG_KEY, Dtype, Ranker
    from as2ray.models.sequential import SequentialNetwork, SequentialRanker
    from as2ray.models.two_in_one import TwoInOneNetwork, TwoInOneRanker
    from as2ray.text.tokenization import PairTokenizer

RANKER_TYPES: dict[str, tuple[Any, type[Ranker]]] = {
    "pointwise": (AutoModelForSequenceClassification, PointwiseRanker),
    "cascade": (CascadeNetwork, CascadeRanker),
    "sequential": (SequentialNetwork, SequentialRanker),
    "two_in_one": (TwoInOneNetwork, TwoInOneRanker),
}
"""What reads the network, and the ranker around it, by the kind that `config.json` names."""

MEMBER_PREFIX = "member-"
"""What the folders of an ensemble's members are called, before their numbers."""


def load(
    path: str | Path,
    *,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
    max_length: int | None = None,
) -> Ranker:
    """A ranker from a checkpoint folder or a hub id, ready to rank.

    Args:
        path: A folder that `save` or transformers wrote, or the id of a hub model.
        precision: Number format of the matrix products; `auto` asks the hardware.
        device: By default the first GPU, or the CPU.
        max_length: Most tokens of a pair; by default what the ranker was trained with, or 128.

    Raises:
        CheckpointError: Not a ranker; weights unknown, missing or of another shape.
    """
    if (found := _read_ensemble_settings(path)) is not None:
        # By number: the tenth's name sorts before the second's.
        folders = [
            Path(path) / f"{MEMBER_PREFIX}{number}" for number in range(len(found["weights"]))
        ]
        how: dict[str, Any] = {"precision": dtype, "device": device, "max_length": max_length}
        ensemble = EnsembleRanker([load(folder, **how) for folder in folders], found["weights"])
        ensemble.calibration = tuple(map(Calibration.from_dict, found["calibration"]))
        ensemble.threshold = found.get("threshold")
        return ensemble.eval()
    ranker, _ = read_ranker(path, max_length=max_length, make_new_head=False)
    ranker.dtype, ranker.use_fused_layers = dtype, True
    ranker.eval()
    return ranker.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _read_ensemble_settings(path: str | Path) -> dict[str, Any] | None:
    """The settings of an ensemble, whose `config.json` has no network beside them."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return None
    with checkpoint_errors(path):
        found: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")).get(CONFIG_KEY, {})
        return found if found.get("ranker") == "ensemble" else None


def build_ranker(
    ranker_type: Any, network: Any, pair_tokenizer: PairTokenizer, hf_tokenizer: Any
) -> Ranker:
    ranker: Ranker = ranker_type(network, pair_tokenizer)
    ranker.hf_tokenizer = hf_tokenizer
    return ranker


def read_ranker(
    path: str | Path, *, max_length: int | None, make_new_head: bool
) -> tuple[Ranker, bool]:
    """The ranker, and whether its head is new: if `new_head`, one is made where there is none."""
    with checkpoint_errors(path), silence_transformers():
        config = read_config(path)
        settings = getattr(config, CONFIG_KEY, {})
        kind = settings.get("ranker", "pointwise")
        if kind not in RANKER_TYPES:
            raise CheckpointError(
                f"{path}: a ranker of kind {kind!r}; expected one of {sorted(RANKER_TYPES)}",
                fix="load it with the release of as2ray that wrote it",
            )
        reader, ranks = RANKER_TYPES[kind]
        is_classifier = kind != "pointwise" or any(
            "SequenceClassification" in a for a in config.architectures or []
        )
        # A classifier of another task (TANDA's RoBERTa-large comes from MNLI) lends its body.
        make_new_head = make_new_head and not (is_classifier and config.num_labels <= 2)
        if make_new_head or not is_classifier:
            config.num_labels = 2
        network, report = reader.from_pretrained(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_gaps` names them
            dtype=torch.float32,
        )
        check_loaded_weights(path, report, network, make_new_head)
        tokenizer = AutoTokenizer.from_pretrained(path)
        _check_tokenizer(path, tokenizer, config.vocab_size)
        definition = tokenizer.backend_tokenizer.to_str()
    pairs = PairTokenizer(definition, **_resolve_lengths(config, settings, max_length))
    ranker = build_ranker(ranks, network, pairs, tokenizer)
    ranker.calibration = tuple(map(Calibration.from_dict, settings.get("calibration", [])))
    ranker.threshold = settings.get("threshold")
    return ranker, make_new_head


def read_config(path: str | Path) -> Any:
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{path}: a checkpoint of type {config.model_type!r}; expected one of {MODEL_TYPES}",
            fix="choose another checkpoint",
        )
    return config


def _check_tokenizer(path: str | Path, tokenizer: Any, num_embeddings: int) -> None:
    """Refuses a tokenizer that transformers made of nothing, or of more ids than the network's."""
    words = len(tokenizer) - len(set(tokenizer.all_special_ids))
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if words <= 0 or highest >= num_embeddings:
        raise CheckpointError(
            f"{path}: a tokenizer of {words} words and ids up to {highest}, for {num_embeddings} "
            "embeddings"
            "; expected the files of the tokenizer that the network was trained with",
            fix="copy tokenizer.json and tokenizer_config.json from where the network came from",
        )


def _resolve_lengths(
    config: Any, settings: dict[str, int], max_length: int | None
) -> dict[str, int]:
    """What was asked, else what the ranker was trained with, else 128 or all there is."""
    most = max_sequence_length(config)
    length = settings.get("max_length", min(128, most)) if max_length is None else max_length
    if length > most:
        raise ConfigError(
            f"max_length={length} for an encoder of {most} positions"
            f"; expected max_length <= {most}",
            fix="lower max_length, or choose an encoder with more positions",
        )
    question = settings.get("max_question", 64)
    if length != settings.get("max_length"):
        question = min(question, length // 2)
    return {"max_length": length, "max_question": question}


@contextmanager
def checkpoint_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except As2rayError:
        raise
    except Exception as error:  # transformers raises many kinds for one cause: not a checkpoint
        raise CheckpointError(
            f"{path}: {type(error).__name__}: {str(error)[:300]}"
            "; expected a folder with config.json, model.safetensors and a tokenizer, or a hub id",
            fix="check the path; offline, only local folders and cached hub ids load",
        ) from error


def load_weights(ranker: Ranker, folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights of a saved ranker, by the names they have in `ranker`."""
    found = load_file(Path(folder) / "model.safetensors")
    return {f"network.{name}": tensor for name, tensor in found.items()}
