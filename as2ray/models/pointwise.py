"""The pointwise ranker: one pair in, the probability that it answers out (TANDA, section 3.2).

Knows the encoder and transformers' classification heads. Must not know files or losses.

Its network is transformers' own `...ForSequenceClassification`, so a saved ranker is an ordinary
Hugging Face checkpoint and any such checkpoint with one or two labels is a ranker.
"""

from torch import Tensor
from transformers import PreTrainedModel

from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.ranker import Ranker, fp32_head
from as2ray.text.packing import PackedBatch
from as2ray.text.tokenization import PairTokenizer


class PointwiseRanker(Ranker):
    """A sequence-classification model over packed pairs.

    Args:
        network: A `...ForSequenceClassification` model with 1 or 2 labels; class 1 is positive.
        tokenizer: How pairs become tokens.
    """

    def __init__(self, network: PreTrainedModel, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        if network.config.num_labels not in (1, 2):
            raise CheckpointError(
                f"a classifier of {network.config.num_labels} labels"
                "; expected 1 label (score) or 2 (not an answer, answer)",
                fix="choose a checkpoint fine-tuned for ranking or yes/no classification",
            )
        self.network = network
        self.encoders = [Encoder(network)]

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits, shape [sequences, labels]."""
        hidden, layout = self.encoder.embed(batch)
        return classify(self.network, self.encoder.run_to_first_token(hidden, layout))


def classify(network: PreTrainedModel, first_token_states: Tensor) -> Tensor:
    """Logits [sequences, labels] of the network's own head.

    Args:
        network: A `...ForSequenceClassification` model.
        first: Hidden states of the first tokens after the last layer, [sequences, hidden].
    """
    # Heads and poolers take [sequences, tokens, hidden] and look at token 0.
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
