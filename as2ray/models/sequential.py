"""The sequential ranker (Cascade Transformer, section 4.2): independent rankers of growing depth.

This is the paper's baseline. Each ranker scores the candidates that the one before has kept and
starts again from the embeddings, so lower layers are computed several times.
"""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from as2ray.cascade.ranker_shape import check_exit_layers
from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder, set_depth
from as2ray.models.multi_stage import MultiStageRanker, StagePass
from as2ray.models.pointwise import classify
from as2ray.models.ranker import CONFIG_KEY, positive_probability
from as2ray.text.packing import PackedBatch, split_by_tokens
from as2ray.text.tokenization import PairTokenizer


class SequentialNetwork(PreTrainedModel):  # type: ignore[misc]
    """Several classifiers of growing depth, in Hugging Face format.

    Args:
        config: Configuration of the deepest classifier. Its entry `as2ray` has `exit_layers`
            (layers of each classifier) and `drop_ratios`.
    """

    base_model_prefix = "rankers"
    _supports_sdpa = True  # the encoders support it; `Encoder` sets packed attention

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        exit_layers = getattr(config, CONFIG_KEY)["exit_layers"]
        check_exit_layers(exit_layers, config.num_hidden_layers)
        self.rankers = nn.ModuleList()
        for num_layers in exit_layers:
            ranker_config = deepcopy(config)
            set_depth(ranker_config, num_layers)
            self.rankers.append(AutoModelForSequenceClassification.from_config(ranker_config))
        self.post_init()

    @classmethod
    def from_networks(cls, networks: Sequence[PreTrainedModel]) -> "SequentialNetwork":
        """Combines trained classifiers, whose weights are copied.

        Args:
            networks: `...ForSequenceClassification` models of one family and growing depth.

        Raises:
            CheckpointError: Their configurations differ in more than the depth.
            ConfigError: Their depths do not grow.
        """
        configs = [_strip_depth(network.config) for network in networks]
        exit_layers = [network.config.num_hidden_layers for network in networks]
        if any(config != configs[0] for config in configs):
            raise CheckpointError(
                "the rankers of a sequential ranker differ in more than their layers",
                fix="train each from the same checkpoint, with another number of layers",
            )
        config = deepcopy(networks[-1].config)
        settings = {
            "ranker": "sequential",
            "exit_layers": exit_layers,
            "drop_ratios": [0.0] * (len(exit_layers) - 1),
        }
        setattr(config, CONFIG_KEY, settings)
        sequential = cls(config)
        for ranker, network in zip(sequential.rankers, networks):
            ranker.load_state_dict(network.state_dict())
        return sequential


def _strip_depth(config: PretrainedConfig) -> dict[str, object]:
    depth = {"num_hidden_layers", "n_layers", "layer_types"}
    ignored = {*depth, CONFIG_KEY, "_name_or_path", "dtype", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name not in ignored}


class _SequentialPass(StagePass):
    """A pass of whole questions through the rankers."""

    ranker: "SequentialRanker"

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """Scores the remaining candidates with one ranker."""

        def predict(batch_rows: np.ndarray) -> Tensor:
            batch = self.sequences.pack(self.rows[rows[batch_rows]], {})
            return positive_probability(self.ranker.forward_ranker(batch, stage_index))

        lengths = self.sequences.lengths[self.rows[rows]]
        batches = split_by_tokens(lengths, self.ranker.balanced_budget(lengths))
        parts = list(self.ranker.map_batches(predict, batches))
        scores: np.ndarray = torch.cat(parts).cpu().numpy()
        return scores


class SequentialRanker(MultiStageRanker):
    """Independent rankers in sequence; its stages are these rankers.

    Args:
        network: The networks of the rankers.
        tokenizer: Turns pairs into tokens.
    """

    stage_pass = _SequentialPass

    def __init__(self, network: SequentialNetwork, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        self.network = network
        self.exit_layers = tuple(getattr(network.config, CONFIG_KEY)["exit_layers"])
        self.encoders = [Encoder(ranker) for ranker in network.rankers]

    def forward(self, batch: PackedBatch, exit_indices: Sequence[int] | None = None) -> Tensor:
        """Returns logits of the rankers, shape [sequences, requested rankers, labels]."""
        indices = range(len(self.exit_layers)) if exit_indices is None else exit_indices
        return torch.stack([self.forward_ranker(batch, index) for index in indices], 1)

    def forward_ranker(self, batch: PackedBatch, ranker_index: int) -> Tensor:
        """Returns logits of one ranker, shape [sequences, labels]."""
        encoder = self.encoders[ranker_index]
        hidden, layout = encoder.embed(batch)
        return classify(self.network.rankers[ranker_index], encoder.run_to_pooled(hidden, layout))
