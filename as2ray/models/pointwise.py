"""The pointwise ranker: maps a pair to the probability of being an answer (TANDA, section 3.2).

Its network is transformers' own `...ForSequenceClassification`, so a saved ranker is an ordinary
Hugging Face checkpoint, and any such checkpoint with one or two labels is a ranker. A ranker with a
linear head (monoBERT of Mokrii et al., section 4) is transformers' `...ForTokenClassification`, of
which the first token counts: it has one linear layer and no pooler.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.packed_ranker import PackedRanker
from as2ray.models.precision import fp32_head
from as2ray.text.packing import PackedBatch
from as2ray.text.tokenization import PairTokenizer


class PointwiseRanker(PackedRanker):
    """A sequence-classification model over packed pairs.

    Args:
        network: A `...ForSequenceClassification` model with 1 or 2 labels; class 1 is positive.
        tokenizer: Turns pairs into tokens.

    Raises:
        CheckpointError: The model has another number of labels.
    """

    keeps_budget = True

    def __init__(self, network: PreTrainedModel, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        if network.config.num_labels not in (1, 2):
            raise CheckpointError(
                f"a ranker has 1 or 2 labels, but this one has {network.config.num_labels} labels",
                fix="choose a checkpoint fine-tuned for ranking or yes/no classification",
            )
        self.network = network
        self.encoders = [Encoder(network)]

    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns logits, shape [sequences, labels]."""
        hidden, layout = self.encoder.embed(batch)
        return classify(self.network, self.encoder.run_to_first_token(hidden, layout))

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""
        return {"ranker": "pointwise"}


class LinearRanker(PointwiseRanker):
    """A token-classification model, whose logits of the first token are those of the pair."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns logits, shape [sequences, labels]."""
        hidden, layout = self.encoder.embed(batch)
        states = self.encoder.run_to_first_token(hidden, layout).float()
        with fp32_head(states):
            logits: Tensor = self.network.classifier(self.network.dropout(states))
        return logits

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""
        return {"ranker": "linear"}


def classify(network: PreTrainedModel, first_token_states: Tensor) -> Tensor:
    """Returns logits [sequences, labels] of the network's own head.

    Args:
        network: A `...ForSequenceClassification` model.
        first_token_states: States of the first tokens after the last layer, [sequences, hidden].
    """
    # Heads and poolers take [sequences, tokens, hidden] and read token 0.
    states = first_token_states.float()[:, None]
    base = network.base_model
    logits: Tensor
    with fp32_head(states):
        if base.config.model_type == "bert":
            logits = network.classifier(network.dropout(base.pooler(states)))
        elif base.config.model_type == "albert":
            pooled = base.pooler_activation(base.pooler(states[:, 0]))
            logits = network.classifier(network.dropout(pooled))
        else:
            logits = network.classifier(states)
    return logits
