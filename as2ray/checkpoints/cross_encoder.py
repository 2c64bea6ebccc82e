"""A pointwise ranker as a checkpoint of sentence-transformers' `CrossEncoder`.

Knows which layer of a family's head gives the labels. Must not import sentence-transformers: it
reads an ordinary Hugging Face checkpoint of one label.
"""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError
from as2ray.models.pointwise import PointwiseRanker
from as2ray.models.ranker import Ranker

SIGMOID_ACTIVATION = "torch.nn.modules.activation.Sigmoid"
"""What `CrossEncoder` makes scores of logits by."""


def export_cross_encoder(ranker: Ranker, folder: str | Path) -> Path:
    """Writes a ranker that `CrossEncoder(folder)` and `CrossEncoder.rank` give the same scores of.

    `CrossEncoder` takes the sigmoid of one logit. That of two is their difference, for
    softmax(a, b)[1] = sigmoid(b - a). Two things stay behind: calibration, which changes scores
    and no order, and the rule that only the candidate is cut to the longest pair.

    Args:
        ranker: A pointwise ranker; it stays as it is.
        folder: Where the checkpoint goes.

    Raises:
        CheckpointError: Another kind of ranker: `CrossEncoder` knows neither exits nor heads.
    """
    if not isinstance(ranker, PointwiseRanker):
        raise CheckpointError(
            f"a {type(ranker).__name__} for sentence-transformers"
            "; expected a pointwise ranker: CrossEncoder knows one head after all layers",
            fix="use it through `as2ray.load`, or `as2ray serve`",
        )
    made = deepcopy(ranker)
    made.calibration, made.threshold = (), None
    network = made.network
    # A ranker that came from a CrossEncoder may carry another activation, of another head.
    vars(network.config).pop("sbert_ce_default_activation_function", None)
    network.config.sentence_transformers = {"activation_fn": SIGMOID_ACTIVATION}
    if made.hf_tokenizer is not None:  # CrossEncoder cuts pairs to its length
        made.hf_tokenizer.model_max_length = ranker.tokenizer.max_length
    if network.config.num_labels == 2:
        head = network.classifier
        if isinstance(head, nn.Linear):
            network.classifier = _subtract_logits(head)
        else:  # RoBERTa's and ELECTRA's
            head.out_proj = _subtract_logits(head.out_proj)
        network.num_labels = network.config.num_labels = 1
    return save(made, folder)


def _subtract_logits(head: nn.Linear) -> nn.Linear:
    """A layer whose one logit is the second minus the first."""
    one = nn.Linear(head.in_features, 1, device=head.weight.device, dtype=head.weight.dtype)
    with torch.no_grad():
        one.weight.copy_(head.weight[1:] - head.weight[:1])
        one.bias.copy_(head.bias[1:] - head.bias[:1])
    return one
