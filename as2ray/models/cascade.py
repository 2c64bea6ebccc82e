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

from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.encoder.encoder import Encoder, truncate
from as2ray.models.encoder.packed_attention import SequenceLayout
from as2ray.models.multi_stage import MultiStageRanker, check_exit_layers
from as2ray.models.ranker import CONFIG_KEY, fp32_head, positive_probability
from as2ray.models.ranking_heads import RankingHeads
from as2ray.text.packing import PackedBatch, TokenSequences, ragged_arange, split_by_tokens
from as2ray.text.tokenization import PairTokenizer

Pooling = ("mean", "first")
"""What a partial classifier looks at: the mean of all token states (the paper), or the first."""


class PartialClassifier(nn.Module):
    """A 3-layer feed-forward of the hidden size with tanh (sections 4.3 and 5.2).

    Args:
        hidden: Size of a token's state.
        pooling: One of `POOLINGS`.
        dropout: Before each of its layers; as in the encoder's own dense layers, in the paper 0.1.
    """

    num_outputs = 1
    """Logits of each sequence are [outputs, 2]."""

    def __init__(self, hidden_size: int, pooling: str, dropout: float) -> None:
        super().__init__()
        self.pooling = pooling
        self.layers = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(hidden_size, hidden_size),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, hidden_size),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, 2),
        )

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """Logits [sequences, 1, 2] of packed states [tokens, hidden]."""
        pooled = (
            hidden[layout.first_tokens] if self.pooling == "first" else mean_pool(hidden, layout)
        )
        with fp32_head(pooled):
            logits: Tensor = self.layers(pooled.float())
        return logits[:, None]

    def score(self, logits: Tensor) -> Tensor:
        """The probability of each sequence, of logits [sequences, 1, 2]."""
        return positive_probability(logits)[:, 0]


def mean_pool(hidden: Tensor, layout: SequenceLayout) -> Tensor:
    """Mean state of each sequence's tokens, [sequences, hidden], of packed [tokens, hidden]."""
    sizes = layout.cu_seqlens.diff()
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
        settings = getattr(config, CONFIG_KEY)
        check_exit_layers(settings["exits"], config.num_hidden_layers)
        bare = {} if config.model_type == "electra" else {"add_pooling_layer": False}
        self.body = AutoModel.from_config(config, **bare)
        self.heads = nn.ModuleList(
            PartialClassifier(config.hidden_size, settings["pooling"], config.hidden_dropout_prob)
            for _ in settings["exits"]
        )
        if settings.get("heads"):
            self.heads[-1] = RankingHeads(
                config, settings["heads"], settings["head_layers"], settings["average"]
            )
        self.post_init()

    @classmethod
    def from_encoder(
        cls,
        body: PreTrainedModel,
        exit_layers: Sequence[int],
        pooling: str = "mean",
        num_ranking_heads: int = 0,
        score_averaging: str = "probabilities",
        has_trained_classifier: bool = True,
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
        if pooling not in Pooling:
            raise ConfigError(
                f"pooling {pooling!r}; expected one of {Pooling}",
            )
        depth = body.config.num_hidden_layers
        check_exit_layers(exit_layers, depth)
        drop = [0.0] * (len(exit_layers) - 1)
        settings: dict[str, Any] = {"ranker": "cascade", "exits": list(exit_layers), "drop": drop}
        settings["pooling"] = pooling
        if num_ranking_heads:
            settings |= {
                "heads": num_ranking_heads,
                "head_layers": depth - exit_layers[-1],
                "average": score_averaging,
            }
        config = deepcopy(body.config)
        config.num_hidden_layers = exit_layers[-1]
        setattr(config, CONFIG_KEY, settings)
        network = cls(config)
        if num_ranking_heads:
            cast(RankingHeads, network.heads[-1]).init_from(
                body, exit_layers[-1], has_trained_classifier
            )
        encoder = truncate(body, exit_layers[-1]).base_model
        weights = {k: v for k, v in encoder.state_dict().items() if not k.startswith("pooler.")}
        network.body.load_state_dict(weights)
        return network


class CascadeRanker(MultiStageRanker):
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
        settings = getattr(network.config, CONFIG_KEY)
        self.exit_layers = tuple(settings["exits"])
        if len(self.encoder) != self.exit_layers[-1]:
            raise CheckpointError(
                f"exits {self.exit_layers} of an encoder of {len(self.encoder)} layers"
                "; expected a last exit after the last layer",
                fix="make the cascade with CascadeNetwork.around",
            )

    def prune_exits(self, exit_layers: Sequence[int]) -> None:
        """Lets partial classifiers go, so that only those after the layers `exits` are left."""
        if (
            not set(exit_layers) <= set(self.exit_layers)
            or tuple(exit_layers)[-1:] != self.exit_layers[-1:]
        ):
            raise ConfigError(
                f"exits {list(exit_layers)} of a cascade with exits {self.exit_layers}"
                f"; expected some of its exits, {self.exit_layers[-1]} the last",
            )
        check_exit_layers(exit_layers, self.exit_layers[-1])
        heads = [self.network.heads[self.exit_layers.index(layer)] for layer in exit_layers]
        self.network.heads = nn.ModuleList(heads)
        self.calibration, self.threshold = (), None
        self.exit_layers = tuple(exit_layers)
        getattr(self.network.config, CONFIG_KEY).update(exits=list(exit_layers))
        self.drop_ratios = 0.0

    def forward(self, batch: PackedBatch, exit_indices: Sequence[int] | None = None) -> Tensor:
        """Logits of the classifiers, nothing dropped.

        Args:
            batch: Packed pairs.
            exits: Numbers of the exits, from 0, ascending; all by default. Layers above the last
                of them are not run.

        Returns:
            Shape [sequences, outputs of the exits asked for, 2]: one of a partial classifier,
            one of each of CERBERUS's heads.
        """
        asked = range(len(self.exit_layers)) if exit_indices is None else exit_indices
        hidden, layout = self.encoder.embed(batch)
        logits, done = [], 0
        for number in asked:
            hidden = self.encoder.run_layers(hidden, layout, done, self.exit_layers[number])
            done = self.exit_layers[number]
            logits.append(self.network.heads[number](hidden, layout))
        return torch.cat(logits, 1)

    def predict_stages(
        self, batch: PackedBatch, exit_indices: Sequence[int] | None = None
    ) -> Tensor:
        """Probabilities of exits, nothing dropped, shape [sequences, exits asked for]."""
        asked = range(len(self.exit_layers)) if exit_indices is None else exit_indices
        heads = [self.network.heads[number] for number in asked]
        logits: Sequence[Tensor] = self(batch, asked).split([head.outputs for head in heads], 1)
        return torch.stack([head.score(own) for head, own in zip(heads, logits)], 1)

    def predict_heads(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """What each output of the last exit says of every pair; float32, shape [pairs, heads]."""
        batches = self.pack(self.tokenizer.encode(questions, candidates))
        last, shape = [len(self.exit_layers) - 1], (len(questions), self.network.heads[-1].outputs)
        with torch.inference_mode():
            return self._predict_by_row(
                batches, shape, lambda batch: positive_probability(self(batch, last))
            )

    def start_pass(
        self, encoded: TokenSequences, rows: np.ndarray, question_index: np.ndarray
    ) -> "_CascadePass":
        """One pass of whole questions through the layers."""
        return _CascadePass(self, encoded, rows, question_index)


class _CascadePass:
    """One pass of whole questions through the layers; the stages are the exits."""

    def __init__(
        self,
        ranker: CascadeRanker,
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
        self.remaining_rows = np.arange(len(rows))
        self.hidden: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ranker.exit_layers)

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """Runs the layers up to an exit over the survivors, and scores them."""
        self._select_rows(rows)
        ranker, first = self.ranker, self.ranker.exit_layers[stage_index - 1] if stage_index else 0
        head, last = ranker.network.heads[stage_index], stage_index == len(self) - 1

        def run(part: tuple[np.ndarray, slice]) -> tuple[Tensor | None, Tensor]:
            which, tokens = part
            if self.hidden is None:
                hidden, layout = ranker.encoder.embed(self.encoded.pack(which, {}))
            else:
                layout = SequenceLayout.from_lengths(self.encoded.lengths[which], ranker.device)
                hidden = self.hidden[tokens]
            hidden = ranker.encoder.run_layers(
                hidden, layout, first, ranker.exit_layers[stage_index]
            )
            return None if last else hidden, head.score(head(hidden, layout))

        states, scores = zip(*ranker.map_batches(run, self._split_batches(rows)))
        self.hidden = None if last else torch.cat(states)
        found: np.ndarray = torch.cat(scores).cpu().numpy()
        return found

    def _split_batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
        """Sequences that go together, and where their tokens lie."""
        start = 0
        lengths = self.encoded.lengths[self.rows[rows]]
        for part in split_by_tokens(lengths, self.ranker.balanced_budget(lengths)):
            tokens = int(lengths[part].sum())
            yield self.rows[rows[part]], slice(start, start + tokens)
            start += tokens

    def _select_rows(self, rows: np.ndarray) -> None:
        """Lets the tokens of all other rows go."""
        if self.hidden is not None and len(rows) < len(self.remaining_rows):
            lengths = self.encoded.lengths[self.rows[self.remaining_rows]]
            starts = np.cumsum(lengths) - lengths
            stays = np.searchsorted(self.remaining_rows, rows)
            tokens = np.repeat(starts[stays], lengths[stays]) + ragged_arange(lengths[stays])
            self.hidden = self.hidden[torch.from_numpy(tokens).to(self.hidden.device)]
        self.remaining_rows = rows
