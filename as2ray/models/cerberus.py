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

from as2ray.errors import RecipeError
from as2ray.models.attention import Layout
from as2ray.models.average import Average
from as2ray.models.encoder import Encoder
from as2ray.models.pointwise import classify
from as2ray.models.ranker import probability


class Heads(nn.Module):
    """k heads of h layers, each with its own classifier.

    Args:
        config: The encoder's.
        heads: How many, k.
        layers: Of each, h.
        average: How they become one score.
    """

    def __init__(
        self, config: PretrainedConfig, heads: int, layers: int, average: Average = "probabilities"
    ) -> None:
        super().__init__()
        if heads < 1 or layers < 1 or average not in get_args(Average):
            raise RecipeError(
                f"{heads} heads of {layers} layers, average {average!r}",
                expected=f"at least one head of one layer, average one of {get_args(Average)}",
                mend="correct the recipe",
            )
        own = deepcopy(config)
        own.num_hidden_layers, own.num_labels = layers, 2
        self.average, self.outputs = average, heads
        self.networks = nn.ModuleList(
            _without_embeddings(AutoModelForSequenceClassification.from_config(own))
            for _ in range(heads)
        )
        self.encoders = [Encoder(network) for network in self.networks]

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Logits [sequences, heads, 2] of the body's packed states [tokens, hidden]."""
        logits = [
            classify(network, encoder.run_to_first(hidden, layout))
            for network, encoder in zip(self.networks, self.encoders)
        ]
        return torch.stack(logits, 1)

    def score(self, logits: Tensor) -> Tensor:
        """One probability of each sequence (equation 5), of logits [sequences, heads, 2]."""
        if self.average == "logits":
            return probability(logits.float().mean(1))
        return probability(logits).mean(1)

    def start_from(self, network: Any, first: int, classifier: bool) -> None:
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
            for own, given in zip(encoder.layers, Encoder(network).layers[first:], strict=True):
                own.load_state_dict(given.state_dict())
            if classifier and network.config.num_labels == 2:
                head.load_state_dict(head_weights, strict=False)


def _without_embeddings(network: PreTrainedModel) -> PreTrainedModel:
    """The network with neither embeddings nor their projection: the body has them."""
    base = network.base_model
    base.embeddings = None
    for name in ("embeddings_project", "encoder.embedding_hidden_mapping_in"):
        *path, last = name.split(".")
        holder = base.get_submodule(".".join(path)) if path else base
        if hasattr(holder, last):
            delattr(holder, last)
    return network
