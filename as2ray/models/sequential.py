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
from as2ray.models.encoder import Encoder
from as2ray.models.pointwise import classify
from as2ray.models.ranker import SETTINGS, probability
from as2ray.models.staged import StagedRanker, check_exits
from as2ray.text.packing import PackedBatch, Sequences, cut
from as2ray.text.tokens import PairTokenizer


class SequentialNetwork(PreTrainedModel):  # type: ignore[misc]
    """Classifiers of growing depth side by side, in Hugging Face format.

    Args:
        config: The deepest one's; its entry `as2ray` holds `exits` (layers of each) and `drop`.
    """

    base_model_prefix = "rankers"
    _supports_sdpa = True  # its encoder does; ours is set on it

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        exits = getattr(config, SETTINGS)["exits"]
        check_exits(exits, config.num_hidden_layers)
        self.rankers = nn.ModuleList()
        for layers in exits:
            own = deepcopy(config)
            own.num_hidden_layers = layers
            self.rankers.append(AutoModelForSequenceClassification.from_config(own))
        self.post_init()

    @classmethod
    def of(cls, networks: Sequence[PreTrainedModel]) -> "SequentialNetwork":
        """Trained classifiers as one network; the weights are theirs.

        Args:
            networks: `...ForSequenceClassification` models of one family and growing depth.
        """
        shapes = [_without_layers(network.config) for network in networks]
        exits = [network.config.num_hidden_layers for network in networks]
        if any(shape != shapes[0] for shape in shapes):
            raise CheckpointError(
                f"rankers of {len(networks)} configurations that differ in more than their layers",
                expected="rankers of one encoder, cut to growing depths",
                mend="train each from the same checkpoint, with another number of layers",
            )
        config = deepcopy(networks[-1].config)
        settings = {"ranker": "sequential", "exits": exits, "drop": [0.0] * (len(exits) - 1)}
        setattr(config, SETTINGS, settings)
        network = cls(config)
        for own, trained in zip(network.rankers, networks):
            own.load_state_dict(trained.state_dict())
        return network


def _without_layers(config: PretrainedConfig) -> dict[str, object]:
    passing = {"num_hidden_layers", SETTINGS, "_name_or_path", "dtype", "architectures"}
    return {name: value for name, value in config.to_dict().items() if name not in passing}


class SequentialRanker(StagedRanker):
    """Independent rankers in sequence; the stages are the rankers.

    Args:
        network: The rankers' networks.
        tokenizer: How pairs become tokens.
    """

    def __init__(self, network: SequentialNetwork, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        self.network = network
        self.exits = tuple(getattr(network.config, SETTINGS)["exits"])
        self.encoders = [Encoder(ranker) for ranker in network.rankers]

    def forward(self, batch: PackedBatch, exits: Sequence[int] | None = None) -> Tensor:
        """Logits of the rankers, shape [sequences, rankers asked for, labels]."""
        asked = range(len(self.exits)) if exits is None else exits
        return torch.stack([self.of_ranker(batch, number) for number in asked], 1)

    def of_ranker(self, batch: PackedBatch, number: int) -> Tensor:
        """Logits of one ranker, shape [sequences, labels]."""
        encoder = self.encoders[number]
        hidden, layout = encoder.embed(batch)
        return classify(self.network.rankers[number], encoder.run_to_first(hidden, layout))

    def stages(self, encoded: Sequences, rows: np.ndarray, question: np.ndarray) -> "_Pass":
        """One pass of whole questions through the rankers."""
        return _Pass(self, encoded, rows, question)


class _Pass:
    """One pass of whole questions through the rankers."""

    def __init__(
        self, ranker: SequentialRanker, encoded: Sequences, rows: np.ndarray, question: np.ndarray
    ) -> None:
        self.ranker, self.encoded, self.rows, self.question = ranker, encoded, rows, question

    def __len__(self) -> int:
        return len(self.ranker.exits)

    def score(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """What a ranker says of the survivors."""

        def run(part: np.ndarray) -> Tensor:
            batch = self.encoded.pack(self.rows[rows[part]], {})
            return probability(self.ranker.of_ranker(batch, stage))

        lengths = self.encoded.lengths[self.rows[rows]]
        parts = cut(lengths, self.ranker.share(lengths))
        found: np.ndarray = torch.cat(list(self.ranker.each(run, parts))).cpu().numpy()
        return found
