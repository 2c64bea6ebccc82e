"""The Cascade Transformer (section 4.3): one encoder whose exits drop candidates.

A partial classifier after some of the layers scores the candidates, and the lowest candidates of
each question are dropped with their tokens. The remaining candidates of many questions stay in one
packed batch, so that late layers still see full batches.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from as2ray.cascade.ranker_shape import check_exit_layers
from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.bm25_stage import check_bm25_weights
from as2ray.models.encoder.encoder import (
    Encoder,
    build_encoder,
    copy_encoder_weights,
    set_depth,
    truncate,
)
from as2ray.models.encoder.families import dense_dropout, get_family, token_pooling
from as2ray.models.encoder.packed_attention import SequenceLayout, take_ranges
from as2ray.models.encoder.pooling import mean_pool
from as2ray.models.feed_forward import build_feed_forward
from as2ray.models.multi_stage import MultiStageRanker, StagePass
from as2ray.models.precision import fp32_head
from as2ray.models.ranker import CONFIG_KEY, positive_probability
from as2ray.models.ranking_heads import ClassifierHead, RankingHeads, ScoreAveraging
from as2ray.text.packing import PackedBatch, TokenSequences, split_by_tokens
from as2ray.text.tokenization import PairTokenizer

Pooling = Literal["mean_of_rest", "mean", "first", "mean_first", "last"]
"""Input of a partial classifier: the mean of all token states but the first (the paper's l = 1..m),
of all states, the first state, the mean of all and the first, or the last state, which a decoder's
classifiers always read."""


class PartialClassifier(nn.Module):
    """A 3-layer feed-forward network with tanh (sections 4.3 and 5.2).

    With both poolings it has 2 layers, which were the best on a frozen encoder.

    Args:
        hidden_size: Size of a token's state.
        pooling: Which states it reads.
        dropout: Dropout before each layer, as in the encoder's own dense layers (paper: 0.1).
    """

    num_outputs = 1
    """Logits of each sequence have the shape [outputs, 2]."""

    def __init__(self, hidden_size: int, pooling: Pooling, dropout: float) -> None:
        super().__init__()
        self.pooling = pooling
        num_hidden_layers, input_size = 2, hidden_size
        if pooling == "mean_first":
            num_hidden_layers, input_size = 1, 2 * hidden_size
        self.layers = build_feed_forward(hidden_size, 2, dropout, num_hidden_layers, input_size)

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """Returns logits [sequences, 1, 2] of packed states [tokens, hidden]."""
        pooled = self.pool(hidden, layout)
        with fp32_head(pooled):
            logits: Tensor = self.layers(pooled)
        return logits[:, None]

    def pool(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """Returns its input [sequences, hidden or 2 * hidden] in fp32."""
        if self.pooling in ("first", "last"):
            is_first = self.pooling == "first"
            return hidden[layout.first_tokens if is_first else layout.last_tokens].float()
        mean = mean_pool(hidden, layout, self.pooling == "mean_of_rest")
        if self.pooling != "mean_first":
            return mean
        return torch.cat([mean, hidden[layout.first_tokens].float()], 1)

    def score(self, logits: Tensor) -> Tensor:
        """Returns the probability of each sequence, of logits [sequences, 1, 2]."""
        return positive_probability(logits)[:, 0]


class CascadeNetwork(PreTrainedModel):  # type: ignore[misc]
    """An encoder with a partial classifier after each exit, in Hugging Face format.

    Args:
        config: Configuration of the encoder. Its entry `as2ray` has `exit_layers` (number of layers
            below each partial classifier, ascending), `drop_ratios` and `pooling`. If the last
            classifier is CERBERUS's heads, it also has `num_ranking_heads`, `layers_per_head` and
            `score_averaging`; if it is a finished ranker's own, `has_classifier`.
    """

    base_model_prefix = "body"
    _supports_sdpa = True  # the encoder supports it; `Encoder` sets packed attention

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        settings = getattr(config, CONFIG_KEY)
        check_exit_layers(settings["exit_layers"], config.num_hidden_layers)
        self.body = build_encoder(config)
        self.heads = nn.ModuleList(
            PartialClassifier(config.hidden_size, settings["pooling"], dense_dropout(config))
            for _ in settings["exit_layers"]
        )
        if settings.get("num_ranking_heads"):
            self.heads[-1] = RankingHeads(
                config,
                settings["num_ranking_heads"],
                settings["layers_per_head"],
                settings["score_averaging"],
            )
        if settings.get("has_classifier"):
            self.heads[-1] = ClassifierHead(config)
        self.post_init()

    @classmethod
    def from_encoder(
        cls,
        body: PreTrainedModel,
        exit_layers: Sequence[int],
        pooling: Pooling = "mean_of_rest",
        num_ranking_heads: int = 0,
        score_averaging: ScoreAveraging = "probabilities",
        has_trained_classifier: bool = True,
    ) -> "CascadeNetwork":
        """Creates a cascade with new partial classifiers from a trained encoder.

        The layers above the last exit are removed, or copied into each of the ranking heads.

        Args:
            body: An encoder, or a model with a head around one; it is truncated in place.
            exit_layers: Number of layers below each partial classifier, ascending.
            pooling: Which states the partial classifiers read.
            num_ranking_heads: Number of CERBERUS's heads, which replace the last partial
                classifier.
            score_averaging: What is averaged over these heads.
            has_trained_classifier: Whether the heads copy the body's classifier.

        Raises:
            ConfigError: The exits are not ascending layers of the encoder, or ranking heads for a
                family with a final norm.
        """
        num_layers = body.config.num_hidden_layers
        check_exit_layers(exit_layers, num_layers)
        if num_ranking_heads and get_family(body.config).final_norm is not None:
            raise ConfigError(
                f"num_ranking_heads={num_ranking_heads}, but layers of "
                f"model_type={body.config.model_type!r} cannot be the first of a head"
            )
        last_exit = exit_layers[-1]
        settings: dict[str, Any] = {
            "ranker": "cascade",
            "exit_layers": list(exit_layers),
            "drop_ratios": [0.0] * (len(exit_layers) - 1),
            "pooling": "last" if token_pooling(body.config) == "last" else pooling,
        }
        if num_ranking_heads:
            settings["num_ranking_heads"] = num_ranking_heads
            settings["layers_per_head"] = num_layers - last_exit
            settings["score_averaging"] = score_averaging
        config = deepcopy(body.config)
        set_depth(config, last_exit)
        setattr(config, CONFIG_KEY, settings)
        network = cls(config)
        if num_ranking_heads:
            heads = cast(RankingHeads, network.heads[-1])
            heads.init_from(body, last_exit, has_trained_classifier)
        copy_encoder_weights(truncate(body, last_exit), network.body)
        return network

    @classmethod
    def from_classifier(
        cls, classifier: PreTrainedModel, exit_layers: Sequence[int]
    ) -> "CascadeNetwork":
        """Creates a cascade whose last exit is a finished ranker, with new partial classifiers.

        Args:
            classifier: A `...ForSequenceClassification` model; it is not changed.
            exit_layers: Number of layers below each partial classifier, ascending, and after them
                all layers of the encoder.

        Raises:
            ConfigError: They are not.
        """
        num_layers = classifier.config.num_hidden_layers
        check_exit_layers(exit_layers, num_layers)
        if exit_layers[-1] != num_layers:
            raise ConfigError(f"exit_layers={list(exit_layers)} must end with {num_layers}")
        config = deepcopy(classifier.config)
        settings = {
            "ranker": "cascade",
            "exit_layers": list(exit_layers),
            "drop_ratios": [0.0] * (len(exit_layers) - 1),
            "pooling": "last" if token_pooling(config) == "last" else "mean_first",
            "has_classifier": True,
        }
        setattr(config, CONFIG_KEY, settings)
        network = cls(config)
        copy_encoder_weights(classifier, network.body)
        cast(ClassifierHead, network.heads[-1]).init_from(classifier)
        return network


@dataclass
class _CascadePass(StagePass):
    """A pass of whole questions through the layers; its stages are the exits."""

    ranker: "CascadeRanker"
    states: Sequence[Tensor] = ()
    """States of the remaining rows after each batch of the last stage; empty before the first
    stage."""
    remaining_rows: np.ndarray = field(init=False)
    """Rows that the last stage scored; unset before the first stage."""

    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """Runs the layers up to an exit over the remaining candidates and scores them."""
        remaining = self._select_states(rows)
        ranker = self.ranker
        head = ranker.network.heads[stage_index]
        is_last = stage_index == len(ranker.exit_layers) - 1
        start_layer = ranker.exit_layers[stage_index - 1] if stage_index else 0

        def run_batch(batch: tuple[np.ndarray, slice]) -> tuple[Tensor | None, Tensor]:
            indices, tokens = batch
            if remaining is None:
                hidden, layout = ranker.encoder.embed(self.sequences.pack(indices, {}))
            else:
                lengths = self.sequences.lengths[indices]
                prefixes = self.sequences.continued_prefixes(indices)
                layout = SequenceLayout.from_lengths(lengths, ranker.device, prefixes)
                hidden = remaining[tokens]
            hidden, logits = ranker.run_exit(stage_index, hidden, layout, start_layer)
            return None if is_last else hidden, head.score(logits)

        self.states, score_parts = zip(*ranker.map_batches(run_batch, self._split_batches(rows)))
        scores: np.ndarray = torch.cat(score_parts).cpu().numpy()
        return scores

    def _split_batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
        """Yields the sequences of each batch and the slice of their tokens."""
        start = 0
        lengths = self.sequences.lengths[self.rows[rows]]
        for batch in split_by_tokens(lengths, self.ranker.balanced_budget(lengths)):
            num_tokens = int(lengths[batch].sum())
            yield self.rows[rows[batch]], slice(start, start + num_tokens)
            start += num_tokens

    def _select_states(self, rows: np.ndarray) -> Tensor | None:
        """Returns the states of the remaining rows, [tokens, hidden]; None before the first stage.

        They are taken from each batch, because joining all states first would copy those that are
        dropped, too.
        """
        if not self.states:
            self.remaining_rows = rows
            return None
        lengths = self.sequences.lengths[self.rows[self.remaining_rows]]
        starts = np.cumsum(lengths) - lengths
        kept_rows = np.searchsorted(self.remaining_rows, rows)
        starts, lengths = starts[kept_rows], lengths[kept_rows]
        ends = np.cumsum([len(states) for states in self.states])
        batch_index = np.searchsorted(ends, starts, side="right")
        kept_states = [
            take_ranges(states, starts[batch_index == batch] - end + len(states), part_lengths)
            for batch, (states, end) in enumerate(zip(self.states, ends))
            if len(part_lengths := lengths[batch_index == batch])
        ]
        self.remaining_rows, self.states = rows, ()
        return torch.cat(kept_states)


class CascadeRanker(MultiStageRanker):
    """A cascade over packed pairs.

    Args:
        network: The encoder with its partial classifiers.
        tokenizer: Turns pairs into tokens.

    Raises:
        CheckpointError: The encoder does not end at the last exit.
        ConfigError: Its margins or weights of BM25 are those of another number of exits.
    """

    stage_pass = _CascadePass
    keeps_budget = True

    def __init__(self, network: CascadeNetwork, tokenizer: PairTokenizer) -> None:
        super().__init__(tokenizer)
        self.network = network
        self.encoders = [Encoder(network.body), *getattr(network.heads[-1], "encoders", [])]
        self.exit_layers = tuple(getattr(network.config, CONFIG_KEY)["exit_layers"])
        if self.margins is not None:
            self.margins.check_stages(len(self.exit_layers))
        check_bm25_weights(self.bm25_weights, len(self.exit_layers))
        if len(self.encoder) != self.exit_layers[-1]:
            raise CheckpointError(
                f"exits {self.exit_layers} do not end at the last layer, {len(self.encoder)}",
                fix="create the cascade with CascadeNetwork.from_encoder",
            )

    @property
    def shares_prefixes(self) -> bool:
        """See `PackedRanker`."""
        return len(self.encoders) == 1 and self.encoder.can_share_prefixes

    def prune_exits(self, exit_layers: Sequence[int]) -> None:
        """Removes the partial classifiers of all exits but some.

        Args:
            exit_layers: The exits to keep; the last one must be among them.

        Raises:
            ConfigError: They are not exits of this cascade, or the last one is not among them.
        """
        is_subset = set(exit_layers) <= set(self.exit_layers)
        if not is_subset or tuple(exit_layers)[-1:] != self.exit_layers[-1:]:
            raise ConfigError(
                f"exit_layers={list(exit_layers)} must be some of the exits {self.exit_layers}, "
                f"ending with {self.exit_layers[-1]}"
            )
        check_exit_layers(exit_layers, self.exit_layers[-1])
        heads = [self.network.heads[self.exit_layers.index(layer)] for layer in exit_layers]
        self.network.heads = nn.ModuleList(heads)
        self.calibration, self.plain_calibration, self.threshold = (), (), None
        self.exit_layers = tuple(exit_layers)
        getattr(self.network.config, CONFIG_KEY)["exit_layers"] = list(exit_layers)
        self.drop_ratios = 0.0

    def forward(
        self,
        batch: PackedBatch,
        exit_indices: Sequence[int] | None = None,
        stop_gradient: bool = False,
    ) -> Tensor:
        """Returns logits of the exits' classifiers without dropping.

        Args:
            batch: Packed pairs.
            exit_indices: Indices of the requested exits, ascending; by default all. Layers above
                the last of them are not run.
            stop_gradient: Whether the gradient of an exit ends at the exit below it.

        Returns:
            Shape [sequences, outputs of the requested exits, 2]; a partial classifier has one
            output, CERBERUS's heads have one each.
        """
        logits = self._exit_logits(batch, exit_indices, stop_gradient)
        return torch.cat([_as_binary(part) for part in logits], 1)

    def run_exit(
        self, exit_index: int, hidden: Tensor, layout: SequenceLayout, start_layer: int
    ) -> tuple[Tensor, Tensor]:
        """Runs the layers up to an exit, and its classifier.

        Args:
            exit_index: Index of the exit.
            hidden: Packed states before `start_layer`, shape [tokens, hidden].
            layout: Positions of the sequences in them.
            start_layer: Index of the first layer to run.

        Returns:
            The states after the layers, pooled if the classifier is a finished ranker's; and the
            logits, shape [sequences, outputs of the exit, 1 or 2].
        """
        head = self.network.heads[exit_index]
        if isinstance(head, ClassifierHead):
            states = self.encoder.run_to_pooled(hidden, layout, start_layer)
            return states, head(states)
        hidden = self.encoder.run_layers(hidden, layout, start_layer, self.exit_layers[exit_index])
        if isinstance(head, RankingHeads):
            return hidden, head(hidden, layout)
        return hidden, head(self.encoder.normalize(hidden), layout)

    def _exit_logits(
        self,
        batch: PackedBatch,
        exit_indices: Sequence[int] | None,
        stop_gradient: bool = False,
    ) -> Iterator[Tensor]:
        """Yields the logits of each requested exit."""
        hidden, layout = self.encoder.embed(batch)
        start_layer = 0
        for index in self._resolve_indices(exit_indices):
            if stop_gradient and index:
                end_layer = self.exit_layers[index - 1]
                with torch.no_grad():
                    hidden = self.encoder.run_layers(hidden, layout, start_layer, end_layer)
                hidden, start_layer = hidden.detach(), end_layer
            hidden, logits = self.run_exit(index, hidden, layout, start_layer)
            start_layer = self.exit_layers[index]
            yield logits

    def predict_stages(
        self, batch: PackedBatch, exit_indices: Sequence[int] | None = None
    ) -> Tensor:
        """Returns scores of exits without dropping, shape [sequences, requested exits]."""
        exit_indices = self._resolve_indices(exit_indices)
        logits = zip(exit_indices, self._exit_logits(batch, exit_indices))
        return torch.stack([self.network.heads[index].score(part) for index, part in logits], 1)

    @property
    def num_outputs(self) -> int:
        """Exits, and heads of the last exit."""
        return sum(head.num_outputs for head in self.network.heads)

    def predict_outputs(self, batch: PackedBatch) -> Tensor:
        """See `PackedRanker`."""
        logits, last_head = self(batch), self.network.heads[-1]
        score = last_head.score(logits[:, -last_head.num_outputs :])
        return torch.cat([positive_probability(logits), score[:, None]], 1)

    def predict_heads(self, sequences: TokenSequences) -> np.ndarray:
        """Returns the score of each output of the last exit; float32, shape [pairs, outputs]."""
        last_index = [len(self.exit_layers) - 1]
        shape = (len(sequences), self.network.heads[-1].num_outputs)
        return self._predict_by_row(
            self.pack(sequences), shape, lambda batch: positive_probability(self(batch, last_index))
        )

    def predict_pooled(self, sequences: TokenSequences) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the partial classifiers of all exits but the last read, and its log-odds.

        Args:
            sequences: Tokenized pairs.

        Returns:
            float32, shape [pairs, exits - 1, input], and the log-odds of the last exit, [pairs].
        """
        heads, last_index = self.network.heads[:-1], len(self.exit_layers) - 1

        def predict(batch: PackedBatch) -> Tensor:
            hidden, layout = self.encoder.embed(batch)
            values, start_layer = [], 0
            for head, end_layer in zip(heads, self.exit_layers):
                hidden = self.encoder.run_layers(hidden, layout, start_layer, end_layer)
                values.append(head.pool(self.encoder.normalize(hidden), layout))
                start_layer = end_layer
            _, logits = self.run_exit(last_index, hidden, layout, start_layer)
            logits = _as_binary(logits)[:, 0].float()
            return torch.cat([*values, logits[:, 1:] - logits[:, :1]], 1)

        num_inputs = sum(head.layers[1].in_features for head in heads)
        shape = (len(sequences), num_inputs + 1)
        values = self._predict_by_row(self.pack(sequences), shape, predict)
        return values[:, :-1].reshape(len(sequences), len(heads), -1), values[:, -1]

    def _resolve_indices(self, exit_indices: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.exit_layers)) if exit_indices is None else exit_indices


def _as_binary(logits: Tensor) -> Tensor:
    """Returns logits of (not an answer, answer), of logits [..., 1 or 2]."""
    return logits if logits.shape[-1] == 2 else functional.pad(logits, (1, 0))
