"""The pointwise ranker: maps a pair to the probability of being an answer (TANDA, section 3.2).

Its network is transformers' own `...ForSequenceClassification`, so a saved ranker is an ordinary
Hugging Face checkpoint, and any such checkpoint with one or two labels is a ranker. A ranker with a
linear head (monoBERT of Mokrii et al., section 4) is transformers' `...ForTokenClassification`, of
which the first token counts: it has one linear layer and no pooler.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from as2ray.cascade.pruning import DropRatios, Pruning, StagedScores
from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.encoder.families import apply_head
from as2ray.models.packed_ranker import PackedRanker
from as2ray.models.precision import fp32_head
from as2ray.text.packing import PackedBatch, TokenSequences
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
                f"num_labels={network.config.num_labels}: a ranker has 1 or 2 labels, but this one "
                f"has {network.config.num_labels} labels",
                fix="choose a checkpoint fine-tuned for ranking or yes/no classification",
            )
        self.network = network
        self.encoders = [Encoder(network)]

    @property
    def shares_prefixes(self) -> bool:
        """See `PackedRanker`."""
        return self.encoder.can_share_prefixes

    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns logits, shape [sequences, labels]."""
        hidden, layout = self.encoder.embed(batch)
        return classify(self.network, self.encoder.run_to_pooled(hidden, layout))

    def predict_sequences(
        self,
        sequences: TokenSequences,
        question_index: np.ndarray,
        drop_ratios: DropRatios | Pruning | None = None,
        bm25_gaps: np.ndarray | None = None,
    ) -> StagedScores:
        """Scores tokenized pairs; see `Ranker.predict_pairs`."""
        if self.activation == "sigmoid":
            return super().predict_sequences(sequences, question_index, drop_ratios)
        self.check_no_drop_ratios(drop_ratios)
        logits = self.predict_logits(self.pack(sequences), len(sequences))
        log_odds = logits[:, 1] - logits[:, 0]
        return StagedScores(torch.from_numpy(log_odds).sigmoid().numpy(), logits=log_odds)

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""
        return {"ranker": "pointwise"}


class LinearRanker(PointwiseRanker):
    """A token-classification model, whose logits of the first token are those of the pair."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns logits, shape [sequences, labels]."""
        hidden, layout = self.encoder.embed(batch)
        states = self.encoder.run_to_tokens(layout.first_tokens, hidden, layout).float()
        with fp32_head(states):
            logits: Tensor = self.network.classifier(self.network.dropout(states))
        return logits

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""
        return {"ranker": "linear"}


def classify(network: PreTrainedModel, pooled_states: Tensor) -> Tensor:
    """Returns logits [sequences, labels] of the network's own head, computed in fp32.

    Args:
        network: A `...ForSequenceClassification` model.
        pooled_states: What its head reads (`Encoder.run_to_pooled`), [sequences, hidden].
    """
    with fp32_head(pooled_states):
        return apply_head(network, pooled_states.float())
