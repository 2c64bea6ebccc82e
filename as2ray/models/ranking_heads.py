"""CERBERUS's heads (section 3.3): several copies of an encoder's last layers over a shared body.

A body of b layers and k heads of h layers, each with a classifier, is written B{b}_{k}H{h}. The
heads follow the last exit of a cascade, so that a body with other exits drops candidates before
them. With no other exit it is the paper's model.
"""

from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from as2ray.models.encoder.encoder import Encoder, set_depth
from as2ray.models.encoder.families import get_family
from as2ray.models.encoder.packed_attention import SequenceLayout
from as2ray.models.pointwise import classify
from as2ray.models.ranker import positive_probability

ScoreAveraging = Literal["probabilities", "logits"]
"""What is averaged over the heads to give one score."""


class RankingHeads(nn.Module):
    """k heads of h layers, each with its own classifier.

    Args:
        config: Configuration of the encoder.
        num_ranking_heads: Number of heads, k.
        layers_per_head: Layers of each head, h.
        score_averaging: What is averaged over the heads to give one score.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_ranking_heads: int,
        layers_per_head: int,
        score_averaging: ScoreAveraging = "probabilities",
    ) -> None:
        super().__init__()
        head_config = deepcopy(config)
        set_depth(head_config, layers_per_head)
        head_config.num_labels = 2
        self.score_averaging, self.num_outputs = score_averaging, num_ranking_heads
        self.networks = nn.ModuleList(
            _remove_embeddings(AutoModelForSequenceClassification.from_config(head_config))
            for _ in range(num_ranking_heads)
        )
        self.encoders = [Encoder(network) for network in self.networks]

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """Returns logits [sequences, heads, 2] of the body's packed states [tokens, hidden]."""
        logits = [
            classify(network, encoder.run_to_pooled(hidden, layout))
            for network, encoder in zip(self.networks, self.encoders)
        ]
        return torch.stack(logits, 1)

    def score(self, logits: Tensor) -> Tensor:
        """Returns one probability per sequence (equation 5), of logits [sequences, heads, 2]."""
        if self.score_averaging == "logits":
            return positive_probability(logits.float().mean(1))
        return positive_probability(logits).mean(1)

    def init_from(self, network: Any, start_layer: int, copy_classifier: bool) -> None:
        """Copies the layers of a network from `start_layer` on into every head.

        Args:
            network: An encoder, or a model with a head around one.
            start_layer: Index of the first layer to copy.
            copy_classifier: Whether its classifier is copied, too.
        """
        source_layers = Encoder(network).layers[start_layer:]
        classifier_weights = {
            name: weights
            for name, weights in network.state_dict().items()
            if not name.startswith(f"{network.base_model_prefix}.") or ".pooler." in name
        }
        layers = get_family(network.config).layers
        shared_weights = {  # DeBERTa's embeddings of distances
            name: weights
            for name, weights in network.base_model.state_dict().items()
            if not name.startswith((layers, "pooler", "embeddings"))
        }
        for head, encoder in zip(self.networks, self.encoders):
            base: Any = head.base_model
            base.load_state_dict(shared_weights, strict=False)
            for layer, source_layer in zip(encoder.layers, source_layers, strict=True):
                layer.load_state_dict(source_layer.state_dict())
            if copy_classifier and network.config.num_labels == 2:
                head.load_state_dict(classifier_weights, strict=False)


class ClassifierHead(nn.Module):
    """The classifier of a finished pointwise ranker, which reads pooled states.

    Args:
        config: Configuration of the ranker.
    """

    num_outputs = 1

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        head_config = deepcopy(config)
        set_depth(head_config, 1)
        self.network = AutoModelForSequenceClassification.from_config(head_config)
        base = self.network.base_model
        for name in [name for name, _ in base.named_children() if not name.startswith("pooler")]:
            setattr(base, name, None)

    def forward(self, pooled_states: Tensor) -> Tensor:
        """Returns logits [sequences, 1, 1 or 2] of pooled states [sequences, hidden]."""
        return classify(self.network, pooled_states)[:, None]

    def score(self, logits: Tensor) -> Tensor:
        """Returns the probability of each sequence, of logits [sequences, 1, 1 or 2]."""
        # In this order as of a pointwise ranker: torch's sigmoid rounds by the shape.
        return positive_probability(logits[:, 0])

    def init_from(self, network: PreTrainedModel) -> None:
        """Copies the classifier and the pooler of a ranker's network."""
        names, weights = self.network.state_dict().keys(), network.state_dict()
        self.network.load_state_dict({name: weights[name] for name in names})


def _remove_embeddings(network: PreTrainedModel) -> PreTrainedModel:
    """Removes the embeddings and their projection, which the body has."""
    base = network.base_model
    setattr(base, get_family(base.config).embeddings, None)
    if hasattr(base, "embeddings_project"):  # ELECTRA
        del base.embeddings_project
    if hasattr(getattr(base, "encoder", None), "embedding_hidden_mapping_in"):  # ALBERT
        del base.encoder.embedding_hidden_mapping_in
    return network
