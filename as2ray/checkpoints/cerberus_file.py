"""The model file of CERBERUS's authors, `cerberus_model.pt`, as a checkpoint of ours.

Knows the parts that such a file must have: ELECTRA's embeddings, a body of layers, k heads of
layers, k classifiers. Must not know what the file calls them: parts are told by their own weights'
names, their order by the numbers in what stands before. All weights must find a place, and every
place a weight.
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
    """A ranker with the file's weights.

    The file has neither configuration nor tokenizer: the encoder that it was made from lends them.

    Args:
        path: The file; nothing but tensors is loaded from it.
        base: The encoder: `google/electra-base-discriminator`, or a folder.
        max_length: Most tokens of a pair.

    Raises:
        CheckpointError: Not such a file, or not of that encoder.
    """
    weights = _load_state_dict(Path(path))
    try:
        return build_ranker(weights, base_model, max_length)
    except (
        _WeightsMismatchError,
        RuntimeError,
        ValueError,
    ) as error:  # torch's, of shapes; of counts
        raise CheckpointError(
            f"{Path(path).name}: {str(error)[:300]}"
            f"; expected embeddings, a body, heads and their classifiers made from {base_model}",
            fix="name the encoder that the file was made from",
        ) from error


class _WeightsMismatchError(Exception):
    """A part that is missing, or that nothing is known of."""


def _load_state_dict(path: Path) -> StateDict:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises many kinds for one cause: no such file
        raise CheckpointError(
            f"{path.name}: {str(error)[:200]}; expected a file of tensors that torch.save wrote",
            fix="check the path; objects other than tensors are not loaded",
        ) from error
    # Training frameworks put the weights under a name, beside counters.
    inner = [v for v in found.values() if isinstance(v, dict)] if isinstance(found, dict) else []
    found = next((v for v in inner if v and _is_state_dict(v)), found)
    if not isinstance(found, dict) or not _is_state_dict(found):
        raise CheckpointError(
            f"{path.name}: no mapping of names to tensors"
            "; expected a model's state dict, bare or under one name",
            fix="choose cerberus_model.pt of a release",
        )
    return {name: v for name, v in found.items() if not name.endswith(BUFFER_SUFFIXES)}


def _is_state_dict(values: Mapping[Any, Any]) -> bool:
    return all(isinstance(k, str) and isinstance(v, Tensor) for k, v in values.items())


def build_ranker(weights: StateDict, base_model: str | Path, max_length: int) -> CascadeRanker:
    encoder = init_ranker(base_model, max_length=max_length).encoder
    layers, rest = _group_weights(weights, encoder.layers[0].state_dict(), r"(?:^|\.)(\d+)$")
    runs: dict[str, list[StateDict]] = {}
    for name in sorted(layers, key=_parse_numbers):
        runs.setdefault(name.rpartition(".")[0], []).append(layers[name])
    if len(runs) < 2:
        raise _WeightsMismatchError(f"{len(layers)} layers in {len(runs)} runs")
    body = max(runs, key=lambda name: len(runs[name]))
    heads = [runs[name] for name in sorted(runs, key=_parse_numbers) if name != body]
    depth = len(runs[body]) + len(heads[0])
    made = init_ranker(
        base_model,
        max_length=max_length,
        num_layers=depth,
        exit_layers=[len(runs[body])],
        num_ranking_heads=len(heads),
    )
    assert isinstance(made, CascadeRanker)
    last: Any = made.network.heads[-1]
    classifiers, rest = _group_weights(rest, last.networks[0].classifier.state_dict())
    if len(classifiers) != len(heads):
        raise _WeightsMismatchError(f"{len(classifiers)} classifiers of {len(heads)} heads")
    rest = _load_embeddings(made, rest)
    if rest:
        raise _WeightsMismatchError(f"{len(rest)} unknown weights {sorted(rest)[:4]}")
    _load_modules(made.encoder.layers, runs[body])
    for of_head, own in zip(last.encoders, heads):
        _load_modules(of_head.layers, own)
    ordered = [classifiers[name] for name in sorted(classifiers, key=_parse_numbers)]
    _load_modules([network.classifier for network in last.networks], ordered)
    return made.eval()


def _group_weights(
    weights: StateDict, suffixes: Iterable[str], prefix_pattern: str = ""
) -> tuple[dict[str, StateDict], StateDict]:
    """Weights of parts whose own names are `names`, by what stands before them; and the others."""
    ends = "|".join(sorted(map(re.escape, suffixes), key=len, reverse=True))
    parts: dict[str, StateDict] = {}
    rest: StateDict = {}
    for name, value in weights.items():
        found = re.fullmatch(rf"(.*?)\.?\b({ends})", name)
        if found and re.search(prefix_pattern, found[1]):
            parts.setdefault(found[1], {})[found[2]] = value
        else:
            rest[name] = value
    return parts, rest


def _parse_numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _load_modules(modules: Iterable[nn.Module], state_dicts: Iterable[StateDict]) -> None:
    for module, own in zip(modules, state_dicts, strict=True):
        module.load_state_dict(own)


def _load_embeddings(ranker: CascadeRanker, weights: StateDict) -> StateDict:
    """Fills the embeddings and their projection, where there is one; the weights left over."""
    parts, rest = _group_weights(weights, ranker.encoder.embeddings.state_dict(), "embeddings$")
    _load_modules([ranker.encoder.embeddings], parts.values())
    if isinstance(ranker.encoder.embedding_projection, nn.Linear):
        parts, rest = _group_weights(
            rest, ranker.encoder.embedding_projection.state_dict(), "embeddings_project$"
        )
        _load_modules([ranker.encoder.embedding_projection], parts.values())
    return rest
