"""The sequential ranker (Cascade Transformer, section 4.2): independent rankers of growing depth.

Knows pointwise networks. Must not know files or losses.

The paper's baseline: each ranker sees what the one before it left, and starts again from the
embeddings, so that layers are run that another ranker has run before.
"""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from as2ray.errors import CheckpointError
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.multi_stage import MultiStageRanker, check_exit_layers
from as2ray.models.pointwise import classify
from as2ray.models.ranker import CONFIG_KEY, positive_probability
from as2ray.text.packing import PackedBatch, TokenSequences, split_by_tokens
from as2ray.text.tokenization import PairTokenizer


class SequentialNetwork(PreTrainedModel):  # type: ignore[misc]
    """Classifiers of growing depth side by side, in Hugging Face format.

    Args:
        config: The deepest one's; its entry `as2ray` holds `exits` (layers of each) and `drop`.
    """

    base_model_prefix = "rankers"
    _supports_sdpa = True  # its encoder does; ours is set on it

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        exits = getattr(config, CONFIG_KEY)["exits"]
        check_exit_layers(exits, config.num_hidden_layers)
        self.rankers = nn.ModuleList()
        for layers in exits:
            own = deepcopy(config)
            own.num_hidden_layers = layers
            self.rankers.append(AutoModelForSequenceClassification.from_config(own))
        self.post_init()

    @classmethod
    def from_networks(cls, networks: Sequence[PreTrainedModel]) -> "SequentialNetwork":
        """Trained classifiers as one network; the weights are theirs.

        Args:
            networks: `...ForSequenceClassification` models of one family and growing depth.
        """
        shapes = [_strip_depth(network.config) for network in networks]
        exits = [network.config.num_hidden_layers for network in networks]
        if any(shape != shapes[0] for shape in shapes):
            raise CheckpointError(
                f"rankers of {len(networks)} configurations that differ in more than their layers"
                "; expected rankers of one encoder, cut to growing depths",
                fix="train each from the same checkpoint, with another number of layers",
            )
        config = deepcopy(networks[-1].config)
        settings = {"ranker": "sequential", "exits": exits, "drop": [0.0] * (len(exits) - 1)}
        setattr(config, CONFIG_KEY, settings)
        network = cls(config)
        for own, trained in zip(network.rankers, networks):
            own.load_state_dict(trained.state_dict())
        return network


def _strip_depth(config: PretrainedConfig) -> dict[str, object]:
    passing = {"num_hidden_layers", CONFIG_KEY, "_name_or_path", "dtype", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name not in passing}


class SequentialRanker(MultiStageRanker):
    """Independent rankers in sequence; the stages are the rankers.

    Args:
        network: The rankers' networks.
        tokenizer: How pairs become tokens.
    """

    def __init__(self, network: SequentialNetwork, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        self.network = network
        self.exit_layers = tuple(getattr(network.config, CONFIG_KEY)["exits"])
        self.encoders = [Encoder(ranker) for ranker in network.rankers]

    def forward(self, batch: PackedBatch, exit_indices: Sequence[int] | None = None) -> Tensor:
        """Logits of the rankers, shape [sequences, rankers asked for, labels]."""
        asked = range(len(self.exit_layers)) if exit_indices is None else exit_indices
        return torch.stack([self.forward_ranker(batch, number) for number in asked], 1)

    def forward_ranker(self, batch: PackedBatch, ranker_index: int) -> Tensor:
        """Logits of one ranker, shape [sequences, labels]."""
        encoder = self.encoders[ranker_index]
        hidden, layout = encoder.embed(batch)
        return classify(
            self.network.rankers[ranker_index], encoder.run_to_first_token(hidden, layout)
        )

    def start_pass(
        self, encoded: TokenSequences, rows: np.ndarray, question_index: np.ndarray
    ) -> "_SequentialPass":
        """One pass of whole questions through the rankers."""
        return _SequentialPass(self, encoded, rows, question_index)


class _SequentialPass:
    """One pass of whole questions through the rankers."""

    def __init__(
        self,
        ranker: SequentialRanker,
        encoded: TokenSequences,
        rows: np.ndarray,
        question_index: np.ndarray,
    ) -> None:
        self.ranker, self.encoded, self.rows, self.question_index = (
            ranker,
            encoded,
            rows,
            question_index,
        )

    def __len__(self) -> int:
        return len(self.ranker.exit_layers)

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """What a ranker says of the survivors."""

        def run(part: np.ndarray) -> Tensor:
            batch = self.encoded.pack(self.rows[rows[part]], {})
            return positive_probability(self.ranker.forward_ranker(batch, stage_index))

        lengths = self.encoded.lengths[self.rows[rows]]
        parts = split_by_tokens(lengths, self.ranker.balanced_budget(lengths))
        found: np.ndarray = torch.cat(list(self.ranker.map_batches(run, parts))).cpu().numpy()
        return found
