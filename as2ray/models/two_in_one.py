"""Two-in-One (section 4.1): one encoder pass scores a passage and the sentences in it.

Knows the encoder and packed windows with markers. Must not know files or losses.

The first token stands for the passage, the marker in front of each sentence for the sentence; a
two-layer head scores either. A passage read in several windows has the highest of their scores, and
a sentence that stands in two of them the mean.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from as2ray.models.encoder import Encoder
from as2ray.models.ranker import SETTINGS
from as2ray.objectives.two_in_one import Joint
from as2ray.text.packing import PackedBatch


def head(hidden: int, dropout: float) -> nn.Sequential:
    """Two layers from a state [n, hidden] to a score [n, 1]."""
    return nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 1),
    )


class TwoInOneNetwork(PreTrainedModel):  # type: ignore[misc]
    """An encoder with a head for passages and one for sentences, in Hugging Face format.

    Args:
        config: The encoder's.
    """

    base_model_prefix = "body"
    _supports_sdpa = True  # its encoder does; ours is set on it

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        bare = {} if config.model_type == "electra" else {"add_pooling_layer": False}
        self.body = AutoModel.from_config(config, **bare)
        self.passage = head(config.hidden_size, config.hidden_dropout_prob)
        self.sentence = head(config.hidden_size, config.hidden_dropout_prob)
        self.post_init()

    @classmethod
    def around(cls, body: PreTrainedModel) -> "TwoInOneNetwork":
        """New heads on a trained body.

        Args:
            body: An encoder, or a model with a head around one.
        """
        encoder = body.base_model
        config = deepcopy(encoder.config)
        setattr(config, SETTINGS, {"ranker": "two_in_one"})
        network = cls(config)
        weights = {k: v for k, v in encoder.state_dict().items() if not k.startswith("pooler.")}
        network.body.load_state_dict(weights)
        return network


class TwoInOneModel(nn.Module):
    """The joint model over packed windows.

    Args:
        network: The encoder with its heads.
    """

    def __init__(self, network: TwoInOneNetwork) -> None:
        super().__init__()
        self.network = network
        self.encoders = [Encoder(network.body)]

    def forward(self, batch: PackedBatch) -> Joint:
        """Scores and states of windows and of the sentences marked in them."""
        encoder = self.encoders[0]
        hidden, layout = encoder.embed(batch)
        hidden = encoder.run(hidden, layout)
        passage = hidden[layout.first_tokens]
        sentence = hidden[torch.from_numpy(batch.marks).to(hidden.device)]
        scores = (self.network.passage(passage), self.network.sentence(sentence))
        return Joint(scores[0][:, 0], scores[1][:, 0], passage, sentence)


def of_passages(scores: Tensor, passage: Tensor, passages: int) -> Tensor:
    """Scores of passages from those of their windows: the highest, shape [passages].

    Args:
        scores: Of windows, shape [windows].
        passage: Number of each one's passage, shape [windows].
        passages: How many there are.
    """
    lowest = torch.full((passages,), -torch.inf, device=scores.device)
    return lowest.scatter_reduce(0, passage.long(), scores.float(), "amax")


def of_sentences(scores: Tensor, sentence: Tensor, sentences: int) -> Tensor:
    """Scores of sentences from those in each window: the mean, shape [sentences].

    Args:
        scores: Of markers, shape [markers].
        sentence: Number of each one's sentence, shape [markers].
        sentences: How many there are.
    """
    zeros = torch.zeros(sentences, device=scores.device)
    return zeros.scatter_reduce(0, sentence.long(), scores.float(), "mean", include_self=False)
