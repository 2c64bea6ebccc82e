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

from as2ray.checkpoint import start
from as2ray.errors import CheckpointError
from as2ray.models.cascade import CascadeRanker
from as2ray.models.published import BUFFERS

Weights = dict[str, Tensor]


def read(path: str | Path, base: str | Path, max_length: int = 128) -> CascadeRanker:
    """A ranker with the file's weights.

    The file has neither configuration nor tokenizer: the encoder that it was made from lends them.

    Args:
        path: The file; nothing but tensors is loaded from it.
        base: The encoder: `google/electra-base-discriminator`, or a folder.
        max_length: Most tokens of a pair.

    Raises:
        CheckpointError: Not such a file, or not of that encoder.
    """
    weights = _weights(Path(path))
    try:
        return _placed(weights, base, max_length)
    except (_DoesNotFitError, RuntimeError, ValueError) as error:  # torch's, of shapes; of counts
        raise CheckpointError(
            f"{Path(path).name}: {str(error)[:300]}",
            expected=f"embeddings, a body, heads and their classifiers made from {base}",
            mend="name the encoder that the file was made from",
        ) from error


class _DoesNotFitError(Exception):
    """A part that is missing, or that nothing is known of."""


def _weights(path: Path) -> Weights:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler raises many kinds for one cause: no such file
        raise CheckpointError(
            f"{path.name}: {str(error)[:200]}",
            expected="a file of tensors that torch.save wrote",
            mend="check the path; objects other than tensors are not loaded",
        ) from error
    # Training frameworks put the weights under a name, beside counters.
    inner = [v for v in found.values() if isinstance(v, dict)] if isinstance(found, dict) else []
    found = next((v for v in inner if v and _all_tensors(v)), found)
    if not isinstance(found, dict) or not _all_tensors(found):
        raise CheckpointError(
            f"{path.name}: no mapping of names to tensors",
            expected="a model's state dict, bare or under one name",
            mend="choose cerberus_model.pt of a release",
        )
    return {name: v for name, v in found.items() if not name.endswith(BUFFERS)}


def _all_tensors(found: Mapping[Any, Any]) -> bool:
    return all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())


def _placed(weights: Weights, base: str | Path, max_length: int) -> CascadeRanker:
    encoder = start(base, max_length=max_length).encoder
    layers, rest = _grouped(weights, encoder.layers[0].state_dict(), r"(?:^|\.)(\d+)$")
    runs: dict[str, list[Weights]] = {}
    for name in sorted(layers, key=_numbers):
        runs.setdefault(name.rpartition(".")[0], []).append(layers[name])
    if len(runs) < 2:
        raise _DoesNotFitError(f"{len(layers)} layers in {len(runs)} runs")
    body = max(runs, key=lambda name: len(runs[name]))
    heads = [runs[name] for name in sorted(runs, key=_numbers) if name != body]
    depth = len(runs[body]) + len(heads[0])
    made = start(
        base, max_length=max_length, layers=depth, exits=[len(runs[body])], heads=len(heads)
    )
    assert isinstance(made, CascadeRanker)
    last: Any = made.network.heads[-1]
    classifiers, rest = _grouped(rest, last.networks[0].classifier.state_dict())
    if len(classifiers) != len(heads):
        raise _DoesNotFitError(f"{len(classifiers)} classifiers of {len(heads)} heads")
    rest = _fill_embeddings(made, rest)
    if rest:
        raise _DoesNotFitError(f"{len(rest)} unknown weights {sorted(rest)[:4]}")
    _fill(made.encoder.layers, runs[body])
    for of_head, own in zip(last.encoders, heads):
        _fill(of_head.layers, own)
    ordered = [classifiers[name] for name in sorted(classifiers, key=_numbers)]
    _fill([network.classifier for network in last.networks], ordered)
    return made.eval()


def _grouped(
    weights: Weights, names: Iterable[str], before: str = ""
) -> tuple[dict[str, Weights], Weights]:
    """Weights of parts whose own names are `names`, by what stands before them; and the others."""
    ends = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    parts: dict[str, Weights] = {}
    rest: Weights = {}
    for name, value in weights.items():
        found = re.fullmatch(rf"(.*?)\.?\b({ends})", name)
        if found and re.search(before, found[1]):
            parts.setdefault(found[1], {})[found[2]] = value
        else:
            rest[name] = value
    return parts, rest


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _fill(modules: Iterable[nn.Module], weights: Iterable[Weights]) -> None:
    for module, own in zip(modules, weights, strict=True):
        module.load_state_dict(own)


def _fill_embeddings(ranker: CascadeRanker, weights: Weights) -> Weights:
    """Fills the embeddings and their projection, where there is one; the weights left over."""
    parts, rest = _grouped(weights, ranker.encoder.embeddings.state_dict(), "embeddings$")
    _fill([ranker.encoder.embeddings], parts.values())
    if isinstance(ranker.encoder.project, nn.Linear):
        parts, rest = _grouped(rest, ranker.encoder.project.state_dict(), "embeddings_project$")
        _fill([ranker.encoder.project], parts.values())
    return rest
