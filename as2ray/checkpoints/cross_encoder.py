"""Exports pointwise rankers as checkpoints of sentence-transformers' `CrossEncoder`.

sentence-transformers is not needed: it reads an ordinary Hugging Face checkpoint with one label.
"""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from as2ray.checkpoints.cross_encoder_files import ACTIVATION_FUNCTIONS
from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.ranker import Ranker

POSITIVE_LABEL = "answer"
"""Name of the only label; transformers' pipeline gives its probability."""


def export_cross_encoder(ranker: Ranker, folder: str | Path) -> Path:
    """Writes a checkpoint with which `CrossEncoder(folder).rank` gives the ranker's scores.

    `CrossEncoder` applies the sigmoid to one logit, or nothing where the ranker does not either.
    Two logits become their difference, because softmax(a, b)[1] = sigmoid(b - a). Two things are
    lost: the calibration, which changes scores but no order, and the rule that only the candidate
    is truncated.

    Args:
        ranker: A pointwise ranker; it is not changed.
        folder: Path of the checkpoint.

    Raises:
        CheckpointError: The ranker is of another kind.
    """
    if type(ranker) is not PointwiseRanker:  # nor one with a linear head
        raise CheckpointError(
            f"{type(ranker).__name__} is no pointwise ranker with the head of its family, so "
            "CrossEncoder cannot run it",
            fix="use it through `as2ray.load` or `as2ray serve`",
        )
    exported = deepcopy(ranker)
    exported.calibration, exported.plain_calibration, exported.threshold = (), (), None
    network = exported.network
    # A ranker that was loaded from a CrossEncoder may have the activation of another head.
    vars(network.config).pop("sbert_ce_default_activation_function", None)
    network.config.sentence_transformers = {
        "activation_fn": ACTIVATION_FUNCTIONS[ranker.activation]
    }
    if exported.hf_tokenizer is not None:  # CrossEncoder truncates pairs to its length
        exported.hf_tokenizer.model_max_length = ranker.tokenizer.max_length
    if network.config.num_labels == 2:
        name = "score" if hasattr(network, "score") else "classifier"  # decoders: score
        head = getattr(network, name)
        if isinstance(head, nn.Linear):
            setattr(network, name, _subtract_logits(head))
        else:  # RoBERTa and ELECTRA
            head.out_proj = _subtract_logits(head.out_proj)
    # These set the number of labels, too.
    network.config.id2label, network.config.label2id = {0: POSITIVE_LABEL}, {POSITIVE_LABEL: 0}
    return save(exported, folder)


def _subtract_logits(head: nn.Linear) -> nn.Linear:
    """Returns a layer whose only logit is the second minus the first."""
    has_bias, like = (
        head.bias is not None,
        {"device": head.weight.device, "dtype": head.weight.dtype},
    )
    layer = nn.Linear(head.in_features, 1, has_bias, **like)
    with torch.no_grad():
        layer.weight.copy_(head.weight[1:] - head.weight[:1])
        if has_bias:
            layer.bias.copy_(head.bias[1:] - head.bias[:1])
    return layer
