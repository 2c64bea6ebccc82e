"""The Cascade Transformer (section 4.3): rankers inside one encoder, each dropping candidates.

Knows the encoder's layers and what pruning asks of a stage. Must not know files or losses.

A partial classifier after some of the layers scores what has come so far; the lowest candidates
of each question leave, and their tokens with them. Survivors of many questions lie together, so
that late layers still see full batches.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from as2ray.errors import CheckpointError, RecipeError
from as2ray.models.attention import Layout
from as2ray.models.average import Average
from as2ray.models.cerberus import Heads
from as2ray.models.encoder import Encoder, truncate
from as2ray.models.ranker import SETTINGS, probability, unrounded
from as2ray.models.staged import StagedRanker, check_exits
from as2ray.text.packing import PackedBatch, Sequences, cut, ragged_arange
from as2ray.text.tokens import PairTokenizer

POOLINGS = ("mean", "first")
"""What a partial classifier looks at: the mean of all token states (the paper), or the first."""


class PartialClassifier(nn.Module):
    """A 3-layer feed-forward of the hidden size with tanh (sections 4.3 and 5.2).

    Args:
        hidden: Size of a token's state.
        pooling: One of `POOLINGS`.
        dropout: Before each of its layers; as in the encoder's own dense layers, in the paper 0.1.
    """

    outputs = 1
    """Logits of each sequence are [outputs, 2]."""

    def __init__(self, hidden: int, pooling: str, dropout: float) -> None:
        super().__init__()
        self.pooling = pooling
        self.layers = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 2),
        )

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Logits [sequences, 1, 2] of packed states [tokens, hidden]."""
        pooled = hidden[layout.first_tokens] if self.pooling == "first" else mean(hidden, layout)
        with unrounded(pooled):
            logits: Tensor = self.layers(pooled.float())
        return logits[:, None]

    def score(self, logits: Tensor) -> Tensor:
        """The probability of each sequence, of logits [sequences, 1, 2]."""
        return probability(logits)[:, 0]


def mean(hidden: Tensor, layout: Layout) -> Tensor:
    """Mean state of each sequence's tokens, [sequences, hidden], of packed [tokens, hidden]."""
    sizes = layout.bounds.diff()
    numbers = torch.arange(len(sizes), device=hidden.device).repeat_interleave(sizes)
    sums = torch.zeros(len(sizes), hidden.shape[1], device=hidden.device)
    return sums.index_add(0, numbers, hidden.float()) / sizes[:, None]


class CascadeNetwork(PreTrainedModel):  # type: ignore[misc]
    """An encoder with a partial classifier after each exit, in Hugging Face format.

    Args:
        config: The encoder's; its entry `as2ray` holds `exits` (layers run before each partial
            classifier, ascending), `drop`, `pooling`, and, where the last classifier is CERBERUS's
            heads, `heads` (how many), `head_layers` and `average`.
    """

    base_model_prefix = "body"
    _supports_sdpa = True  # its encoder does; ours is set on it

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        settings = getattr(config, SETTINGS)
        check_exits(settings["exits"], config.num_hidden_layers)
        bare = {} if config.model_type == "electra" else {"add_pooling_layer": False}
        self.body = AutoModel.from_config(config, **bare)
        self.heads = nn.ModuleList(
            PartialClassifier(config.hidden_size, settings["pooling"], config.hidden_dropout_prob)
            for _ in settings["exits"]
        )
        if settings.get("heads"):
            self.heads[-1] = Heads(
                config, settings["heads"], settings["head_layers"], settings["average"]
            )
        self.post_init()

    @classmethod
    def around(
        cls,
        body: PreTrainedModel,
        exits: Sequence[int],
        pooling: str = "mean",
        heads: int = 0,
        average: Average = "probabilities",
        trained: bool = True,
    ) -> "CascadeNetwork":
        """A cascade on a trained body, with new partial classifiers.

        Without heads the layers above the last exit go; with heads they are copied into each.

        Args:
            body: An encoder, or a model with a head around one; its layers are cut in place.
            exits: Layers run before each partial classifier, ascending.
            pooling: One of `POOLINGS`.
            heads: CERBERUS's heads after the last exit, in place of its partial classifier.
            average: How they become one score.
            trained: Whether the body's own classifier is trained, and its heads start from it.
        """
        if pooling not in POOLINGS:
            raise RecipeError(
                f"pooling {pooling!r}", expected=f"one of {POOLINGS}", mend="choose one"
            )
        depth = body.config.num_hidden_layers
        check_exits(exits, depth)
        drop = [0.0] * (len(exits) - 1)
        settings: dict[str, Any] = {"ranker": "cascade", "exits": list(exits), "drop": drop}
        settings["pooling"] = pooling
        if heads:
            settings |= {"heads": heads, "head_layers": depth - exits[-1], "average": average}
        config = deepcopy(body.config)
        config.num_hidden_layers = exits[-1]
        setattr(config, SETTINGS, settings)
        network = cls(config)
        if heads:
            cast(Heads, network.heads[-1]).start_from(body, exits[-1], trained)
        encoder = truncate(body, exits[-1]).base_model
        weights = {k: v for k, v in encoder.state_dict().items() if not k.startswith("pooler.")}
        network.body.load_state_dict(weights)
        return network


class CascadeRanker(StagedRanker):
    """A cascade over packed pairs.

    Args:
        network: The encoder with its partial classifiers.
        tokenizer: How pairs become tokens.
    """

    def __init__(self, network: CascadeNetwork, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        self.network = network
        last = network.heads[-1]
        self.encoders = [Encoder(network.body), *getattr(last, "encoders", [])]
        settings = getattr(network.config, SETTINGS)
        self.exits = tuple(settings["exits"])
        if len(self.encoder) != self.exits[-1]:
            raise CheckpointError(
                f"exits {self.exits} of an encoder of {len(self.encoder)} layers",
                expected="a last exit after the last layer",
                mend="make the cascade with CascadeNetwork.around",
            )

    def keep(self, exits: Sequence[int]) -> None:
        """Lets partial classifiers go, so that only those after the layers `exits` are left."""
        if not set(exits) <= set(self.exits) or tuple(exits)[-1:] != self.exits[-1:]:
            raise RecipeError(
                f"exits {list(exits)} of a cascade with exits {self.exits}",
                expected=f"some of its exits, {self.exits[-1]} the last",
                mend="correct the exits",
            )
        check_exits(exits, self.exits[-1])
        heads = [self.network.heads[self.exits.index(layer)] for layer in exits]
        self.network.heads = nn.ModuleList(heads)
        self.calibration, self.threshold = (), None
        self.exits = tuple(exits)
        getattr(self.network.config, SETTINGS).update(exits=list(exits))
        self.drop = 0.0

    def forward(self, batch: PackedBatch, exits: Sequence[int] | None = None) -> Tensor:
        """Logits of the classifiers, nothing dropped.

        Args:
            batch: Packed pairs.
            exits: Numbers of the exits, from 0, ascending; all by default. Layers above the last
                of them are not run.

        Returns:
            Shape [sequences, outputs of the exits asked for, 2]: one of a partial classifier,
            one of each of CERBERUS's heads.
        """
        asked = range(len(self.exits)) if exits is None else exits
        hidden, layout = self.encoder.embed(batch)
        logits, done = [], 0
        for number in asked:
            hidden = self.encoder.run(hidden, layout, done, self.exits[number])
            done = self.exits[number]
            logits.append(self.network.heads[number](hidden, layout))
        return torch.cat(logits, 1)

    def stage_scores(self, batch: PackedBatch, exits: Sequence[int] | None = None) -> Tensor:
        """Probabilities of exits, nothing dropped, shape [sequences, exits asked for]."""
        asked = range(len(self.exits)) if exits is None else exits
        heads = [self.network.heads[number] for number in asked]
        logits: Sequence[Tensor] = self(batch, asked).split([head.outputs for head in heads], 1)
        return torch.stack([head.score(own) for head, own in zip(heads, logits)], 1)

    def score_heads(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """What each output of the last exit says of every pair; float32, shape [pairs, heads]."""
        batches = self.pack(self.tokenizer.encode(questions, candidates))
        last, shape = [len(self.exits) - 1], (len(questions), self.network.heads[-1].outputs)
        with torch.inference_mode():
            return self._by_row(batches, shape, lambda batch: probability(self(batch, last)))

    def stages(self, encoded: Sequences, rows: np.ndarray, question: np.ndarray) -> "_Pass":
        """One pass of whole questions through the layers."""
        return _Pass(self, encoded, rows, question)


class _Pass:
    """One pass of whole questions through the layers; the stages are the exits."""

    def __init__(
        self, ranker: CascadeRanker, encoded: Sequences, rows: np.ndarray, question: np.ndarray
    ) -> None:
        self.ranker, self.encoded, self.rows, self.question = ranker, encoded, rows, question
        self.left = np.arange(len(rows))
        self.hidden: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ranker.exits)

    def score(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """Runs the layers up to an exit over the survivors, and scores them."""
        self._keep(rows)
        ranker, first = self.ranker, self.ranker.exits[stage - 1] if stage else 0
        head, last = ranker.network.heads[stage], stage == len(self) - 1

        def run(part: tuple[np.ndarray, slice]) -> tuple[Tensor | None, Tensor]:
            which, tokens = part
            if self.hidden is None:
                hidden, layout = ranker.encoder.embed(self.encoded.pack(which, {}))
            else:
                layout = Layout.of(self.encoded.lengths[which], ranker.device)
                hidden = self.hidden[tokens]
            hidden = ranker.encoder.run(hidden, layout, first, ranker.exits[stage])
            return None if last else hidden, head.score(head(hidden, layout))

        states, scores = zip(*ranker.each(run, self._parts(rows)))
        self.hidden = None if last else torch.cat(states)
        found: np.ndarray = torch.cat(scores).cpu().numpy()
        return found

    def _parts(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
        """Sequences that go together, and where their tokens lie."""
        start = 0
        lengths = self.encoded.lengths[self.rows[rows]]
        for part in cut(lengths, self.ranker.share(lengths)):
            tokens = int(lengths[part].sum())
            yield self.rows[rows[part]], slice(start, start + tokens)
            start += tokens

    def _keep(self, rows: np.ndarray) -> None:
        """Lets the tokens of all other rows go."""
        if self.hidden is not None and len(rows) < len(self.left):
            lengths = self.encoded.lengths[self.rows[self.left]]
            starts = np.cumsum(lengths) - lengths
            stays = np.searchsorted(self.left, rows)
            tokens = np.repeat(starts[stays], lengths[stays]) + ragged_arange(lengths[stays])
            self.hidden = self.hidden[torch.from_numpy(tokens).to(self.hidden.device)]
        self.left = rows
