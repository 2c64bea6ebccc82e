"""Converts `cerberus_model.pt`, the model file of CERBERUS's authors, into a checkpoint.

The file has ELECTRA's embeddings, a body of layers, k heads of layers, and k classifiers, under
unknown names. A part is recognized by the names of its own weights. The parts' order follows from
the numbers in their names. Every weight of the file must be used, and every weight of the ranker
must be in the file.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.weight_checks import BUFFER_SUFFIXES
from as2ray.errors import CheckpointError
from as2ray.models.cascade import CascadeRanker

StateDict = dict[str, Tensor]


def load_cerberus_file(
    path: str | Path, base_model: str | Path, max_length: int = 128
) -> CascadeRanker:
    """Loads a ranker from the authors' file, which has neither configuration nor tokenizer.

    Args:
        path: The file; only tensors are loaded from it.
        base_model: The encoder that the file was made from, for configuration and tokenizer:
            `google/electra-base-discriminator`, or a folder.
        max_length: Maximum number of tokens of a pair.

    Raises:
        CheckpointError: It is no such file, or it was made from another encoder.
    """
    weights = _load_state_dict(Path(path))
    try:
        return _build_ranker(weights, base_model, max_length)
    # torch raises RuntimeError for wrong shapes; missing and unknown parts are a ValueError.
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{Path(path).name} does not have the embeddings, body, heads and classifiers of a "
            f"CERBERUS model made from {base_model}: {str(error)[:300]}",
            fix="name the encoder that the file was made from",
        ) from error


def _load_state_dict(path: Path) -> StateDict:
    if not path.is_file() or not path.stat().st_size:
        problem = f"{path} is {'an empty file' if path.is_file() else 'no file'}"
        raise CheckpointError(problem, fix="choose cerberus_model.pt of a release")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises many types for a file of another format
        raise CheckpointError(
            f"{path.name} is no file of tensors that torch.save wrote: {str(error)[:200]}",
            fix="check the path; objects other than tensors are not loaded",
        ) from error
    # Training frameworks store the weights under a name, next to counters.
    values = content.values() if isinstance(content, dict) else ()
    nested = (value for value in values if isinstance(value, dict) and value)
    state_dict = next((value for value in nested if _is_state_dict(value)), content)
    if not isinstance(state_dict, dict) or not _is_state_dict(state_dict):
        raise CheckpointError(
            f"{path.name} has no state dict, neither at the top nor under one name",
            fix="choose cerberus_model.pt of a release",
        )
    return {k: v for k, v in state_dict.items() if not k.endswith(BUFFER_SUFFIXES)}


def _is_state_dict(values: Mapping[Any, Any]) -> bool:
    return all(isinstance(k, str) and isinstance(v, Tensor) for k, v in values.items())


def _build_ranker(weights: StateDict, base_model: str | Path, max_length: int) -> CascadeRanker:
    encoder = init_ranker(base_model, max_length=max_length).encoder
    layers, other_weights = _group_weights(
        weights, encoder.layers[0].state_dict(), r"(?:^|\.)(\d+)$"
    )
    stacks: dict[str, list[StateDict]] = {}
    for name in sorted(layers, key=_parse_numbers):
        stacks.setdefault(name.rpartition(".")[0], []).append(layers[name])
    if len(stacks) < 2:
        raise ValueError(f"{len(layers)} layers in {len(stacks)} stacks")
    body = max(stacks, key=lambda name: len(stacks[name]))
    head_layers = [stacks[name] for name in sorted(stacks, key=_parse_numbers) if name != body]
    ranker = init_ranker(
        base_model,
        max_length=max_length,
        num_layers=len(stacks[body]) + len(head_layers[0]),
        exit_layers=[len(stacks[body])],
        num_ranking_heads=len(head_layers),
    )
    assert isinstance(ranker, CascadeRanker)
    heads: Any = ranker.network.heads[-1]
    classifiers, other_weights = _group_weights(
        other_weights, heads.networks[0].classifier.state_dict()
    )
    if len(classifiers) != len(head_layers):
        raise ValueError(f"{len(classifiers)} classifiers of {len(head_layers)} heads")
    other_weights = _load_embeddings(ranker, other_weights)
    if other_weights:
        raise ValueError(f"{len(other_weights)} unknown weights {sorted(other_weights)[:4]}")
    _load_modules(ranker.encoder.layers, stacks[body])
    for head_encoder, state_dicts in zip(heads.encoders, head_layers):
        _load_modules(head_encoder.layers, state_dicts)
    ordered_classifiers = [classifiers[name] for name in sorted(classifiers, key=_parse_numbers)]
    _load_modules([network.classifier for network in heads.networks], ordered_classifiers)
    return ranker.eval()


def _group_weights(
    weights: StateDict, suffixes: Iterable[str], prefix_pattern: str = ""
) -> tuple[dict[str, StateDict], StateDict]:
    """Groups weights into parts.

    Args:
        weights: Weights by name.
        suffixes: Names of a part's own weights.
        prefix_pattern: Pattern of the name of a part.

    Returns:
        The weights of each part by the part's name, and all other weights.
    """
    suffix_pattern = "|".join(sorted(map(re.escape, suffixes), key=len, reverse=True))
    parts: dict[str, StateDict] = {}
    others: StateDict = {}
    for name, value in weights.items():
        match = re.fullmatch(rf"(.*?)\.?\b({suffix_pattern})", name)
        if match and re.search(prefix_pattern, match[1]):
            parts.setdefault(match[1], {})[match[2]] = value
        else:
            others[name] = value
    return parts, others


def _parse_numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _load_modules(modules: Iterable[nn.Module], state_dicts: Iterable[StateDict]) -> None:
    for module, state_dict in zip(modules, state_dicts, strict=True):
        module.load_state_dict(state_dict)


def _load_embeddings(ranker: CascadeRanker, weights: StateDict) -> StateDict:
    """Loads the embeddings and, if there is one, their projection; returns all other weights."""
    encoder = ranker.encoder
    parts, others = _group_weights(weights, encoder.embeddings.state_dict(), "embeddings$")
    _load_modules([encoder.embeddings], parts.values())
    if isinstance(encoder.embedding_projection, nn.Linear):
        parts, others = _group_weights(
            others, encoder.embedding_projection.state_dict(), "embeddings_project$"
        )
        _load_modules([encoder.embedding_projection], parts.values())
    return others
