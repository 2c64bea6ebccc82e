"""Runs the embeddings and any range of layers of a Hugging Face encoder over packed batches.

The papers run parts of an encoder: the first 4 layers, then 2 more for the remaining candidates; or
11 shared layers, then 3 heads of one layer. The layers are transformers' own, unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from as2ray.errors import CheckpointError
from as2ray.models.encoder.fused_layers import FusedLayers, distinct_layers
from as2ray.models.encoder.int8 import ActivationRanges
from as2ray.models.encoder.packed_attention import ATTENTION_IMPLEMENTATION, SequenceLayout
from as2ray.text.packing import PackedBatch

MODEL_TYPES = ("bert", "roberta", "electra", "albert")
"""Supported values of `config.model_type`."""

_LOCK = Lock()
"""Guards the fused layers, because several threads may rank with one encoder."""


class Encoder:
    """Embeddings and layers of a transformers model, for packed batches.

    It is a view: the modules stay in the model, under the names of its checkpoint.

    Args:
        base: A `BertModel`, `RobertaModel`, `ElectraModel` or `AlbertModel`, or a model with a
            head around one.

    Raises:
        CheckpointError: The model is of another family.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        family = base.config.model_type
        if family not in MODEL_TYPES:
            raise CheckpointError(f"model type {family!r} is none of {MODEL_TYPES}")
        base.set_attn_implementation(ATTENTION_IMPLEMENTATION)
        base = cast(Any, base.base_model)
        self.embeddings = base.embeddings
        self.embedding_projection = _find_embedding_projection(base)
        self.layers = _list_layers(base)
        self.first_position = first_position(base.config)
        self.gradient_checkpointing = False
        self._fused: FusedLayers | None = None
        self._num_fused_contexts = 0

    @contextmanager
    def fused_inference(
        self, dtype: torch.dtype, ranges: ActivationRanges | None = None
    ) -> Iterator[None]:
        """Runs fused layers inside the context, in all threads; for inference only.

        Args:
            dtype: Number format of matrix products.
            ranges: For int8, the ranges of their inputs.
        """
        with _LOCK:
            if self._fused is None or not self._fused.is_current(self.layers, dtype, ranges):
                self._fused = FusedLayers(self.layers, dtype, ranges)
            self._num_fused_contexts += 1
        try:
            yield
        finally:
            with _LOCK:
                self._num_fused_contexts -= 1

    @contextmanager
    def observe_ranges(self) -> Iterator[FusedLayers]:
        """Runs fused layers in fp32 inside the context, which keep the ranges of their inputs."""
        self._fused = None
        with self.fused_inference(torch.float32):
            fused = cast(FusedLayers, self._fused)
            fused.observe()
            try:
                yield fused
            finally:
                self._fused = None

    def ranges_problem(self, ranges: ActivationRanges) -> str | None:
        """Returns why ranges do not fit this encoder's weights; None if they do."""
        return ranges.problem(distinct_layers(self.layers))

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.layers[0].parameters()).device
        return device

    def embed(self, batch: PackedBatch) -> tuple[Tensor, SequenceLayout]:
        """Returns hidden states before the first layer, shape [tokens, hidden], and the layout."""
        ids, types, positions = (
            torch.from_numpy(x).to(self.device, torch.long, non_blocking=True)[None]
            for x in (batch.token_ids, batch.token_types, batch.positions)
        )
        positions = positions + self.first_position
        hidden = self.embeddings(ids, token_type_ids=types, position_ids=positions)
        hidden = hidden if self.embedding_projection is None else self.embedding_projection(hidden)
        return hidden[0], SequenceLayout.from_lengths(batch.lengths, self.device)

    def run_layers(
        self,
        hidden: Tensor,
        layout: SequenceLayout,
        start_layer: int = 0,
        end_layer: int | None = None,
    ) -> Tensor:
        """Returns hidden states after the layers from `start_layer` to before `end_layer`.

        Args:
            hidden: Packed states, shape [tokens, hidden].
            layout: Positions of the sequences in them.
            start_layer: Index of the first layer to run.
            end_layer: Index of the first layer not to run; by default all are run.
        """
        if self._num_fused_contexts and self._fused is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                return self._fused.run_layers(hidden, layout, start_layer, end_layer)
        states = hidden[None]
        for layer in self.layers[start_layer:end_layer]:
            if self.gradient_checkpointing and layer.training:
                states = checkpoint(layer, states, None, layout=layout, use_reentrant=False)
            else:
                states = layer(states, None, layout=layout)
        return states[0]

    def run_to_first_token(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """Returns states of the first tokens after all layers, shape [sequences, hidden].

        Args:
            hidden: Packed states before the first layer, shape [tokens, hidden].
            layout: Positions of the sequences in them.
        """
        return self.run_to_tokens(layout.first_tokens, hidden, layout)

    def run_to_tokens(
        self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout, start_layer: int = 0
    ) -> Tensor:
        """Returns states of some tokens after all layers, shape [n, hidden].

        In `fused_inference` the last layer computes only these tokens.

        Args:
            token_index: Indices of the tokens, shape [n].
            hidden: Packed states before `start_layer`, shape [tokens, hidden].
            layout: Positions of the sequences in them.
            start_layer: Index of the first layer to run.
        """
        if self._num_fused_contexts and self._fused is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                return self._fused.run_to_tokens(token_index, hidden, layout, start_layer)
        return self.run_layers(hidden, layout, start_layer)[token_index]


def first_position(config: Any) -> int:
    """Returns the index of a sequence's first position: RoBERTa counts from padding_idx + 1."""
    return int(config.pad_token_id) + 1 if config.model_type == "roberta" else 0


def max_sequence_length(config: Any) -> int:
    """Returns the maximum number of tokens of a sequence, given by the encoder's positions."""
    return int(config.max_position_embeddings) - first_position(config)


def _find_embedding_projection(base: Any) -> nn.Module | None:
    """Returns the map from embedding to hidden size, or None if the family has none."""
    projection = getattr(base.encoder, "embedding_hidden_mapping_in", None)  # ALBERT
    return projection or getattr(base, "embeddings_project", None)  # ELECTRA


def _list_layers(base: Any) -> list[nn.Module]:
    """Returns the layers in the order they run; an ALBERT group is listed once per run."""
    if not hasattr(base.encoder, "albert_layer_groups"):
        return list(base.encoder.layer)
    groups, num_layers = base.encoder.albert_layer_groups, base.config.num_hidden_layers
    return [groups[int(i / (num_layers / len(groups)))] for i in range(num_layers)]


def build_encoder(config: PretrainedConfig) -> PreTrainedModel:
    """Builds an encoder with new weights and without a pooler."""
    # ELECTRA has no pooler and does not accept the option.
    options = {} if config.model_type == "electra" else {"add_pooling_layer": False}
    return cast(PreTrainedModel, AutoModel.from_config(config, **options))


def copy_encoder_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copies an encoder's weights, without its pooler, into an encoder without a pooler.

    Args:
        source: An encoder, or a model with a head around one.
        target: An encoder that `build_encoder` built.
    """
    weights = source.base_model.state_dict().items()
    target.load_state_dict({k: v for k, v in weights if not k.startswith("pooler.")})


def truncate(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Removes all but the first layers of a model, in place (the papers' 4- to 10-layer models).

    Raises:
        CheckpointError: The model has fewer layers, or is an ALBERT with several layer groups.
    """
    model_layers = model.config.num_hidden_layers
    if not 0 < num_layers <= model_layers:
        raise CheckpointError(f"num_layers={num_layers} is not from 1 to {model_layers}")
    encoder = model.base_model.encoder
    if hasattr(encoder, "layer"):
        encoder.layer = encoder.layer[:num_layers]
    elif num_layers < model_layers and model.config.num_hidden_groups > 1:
        raise CheckpointError(
            f"an ALBERT with {model.config.num_hidden_groups} layer groups cannot be truncated",
            fix="choose an ALBERT with num_hidden_groups=1",
        )
    model.config.num_hidden_layers = num_layers
    return model
