"""CERBERUS's heads (section 3.3): several last parts of an encoder over one shared first part.

Knows transformers' layers and classification heads. Must not know teachers, files or losses.

A body of b layers and k heads of h layers with a classifier each, written B{b}_{k}H{h}. The heads
are what stands after the last exit of a cascade, so that a body with exits prunes and the heads see
survivors alone; with no other exit it is the paper's model.
"""

from copy import deepcopy
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from as2ray.errors import ConfigError
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.encoder.packed_attention import SequenceLayout
from as2ray.models.pointwise import classify
from as2ray.models.ranker import positive_probability


class RankingHeads(nn.Module):
    """k heads of h layers, each with its own classifier.

    Args:
        config: The encoder's.
        heads: How many, k.
        layers: Of each, h.
        average: How they become one score.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_ranking_heads: int,
        layers_per_head: int,
        score_averaging: str = "probabilities",
    ) -> None:
        super().__init__()
        if num_ranking_heads < 1 or layers_per_head < 1 or score_averaging not in get_args(str):
            raise ConfigError(
                f"{num_ranking_heads} heads of {layers_per_head} layers, average {score_averaging!r}"
                f"; expected at least one head of one layer, average one of {get_args(str)}",
            )
        own = deepcopy(config)
        own.num_hidden_layers, own.num_labels = layers_per_head, 2
        self.score_averaging, self.num_outputs = score_averaging, num_ranking_heads
        self.networks = nn.ModuleList(
            _remove_embeddings(AutoModelForSequenceClassification.from_config(own))
            for _ in range(num_ranking_heads)
        )
        self.encoders = [Encoder(network) for network in self.networks]

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """Logits [sequences, heads, 2] of the body's packed states [tokens, hidden]."""
        logits = [
            classify(network, encoder.run_to_first_token(hidden, layout))
            for network, encoder in zip(self.networks, self.encoders)
        ]
        return torch.stack(logits, 1)

    def score(self, logits: Tensor) -> Tensor:
        """One probability of each sequence (equation 5), of logits [sequences, heads, 2]."""
        if self.score_averaging == "logits":
            return positive_probability(logits.float().mean(1))
        return positive_probability(logits).mean(1)

    def init_from(self, network: Any, start_layer: int, copy_classifier: bool) -> None:
        """Copies layers of a network into every head.

        Args:
            network: An encoder, or a model with a head around one.
            first: Number of the first layer to copy, from 0.
            classifier: Whether its classifier is copied too.
        """
        head_weights = {
            name: weights
            for name, weights in network.state_dict().items()
            if name.startswith("classifier.") or ".pooler." in name
        }
        for head, encoder in zip(self.networks, self.encoders):
            for own, given in zip(
                encoder.layers, Encoder(network).layers[start_layer:], strict=True
            ):
                own.load_state_dict(given.state_dict())
            if copy_classifier and network.config.num_labels == 2:
                head.load_state_dict(head_weights, strict=False)


def _remove_embeddings(network: PreTrainedModel) -> PreTrainedModel:
    """The network with neither embeddings nor their projection: the body has them."""
    base = network.base_model
    base.embeddings = None
    for name in ("embeddings_project", "encoder.embedding_hidden_mapping_in"):
        *path, last = name.split(".")
        holder = base.get_submodule(".".join(path)) if path else base
        if hasattr(holder, last):
            delattr(holder, last)
    return network
