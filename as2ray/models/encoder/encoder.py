"""Runs the embeddings and any range of layers of a Hugging Face encoder over packed batches.

The papers run parts of an encoder: the first 4 layers, then 2 more for the remaining candidates; or
11 shared layers, then 3 heads of one layer. The layers are transformers' own, unchanged.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from as2ray.errors import CheckpointError
from as2ray.models.encoder.disentangled_attention import (
    PositionProjections,
    disentangled_attention,
)
from as2ray.models.encoder.families import (
    first_position,
    get_family,
    get_layers,
    set_layers,
    token_pooling,
)
from as2ray.models.encoder.fused_layers import FusedLayers, distinct_layers
from as2ray.models.encoder.inference_bert import InferenceBert
from as2ray.models.encoder.int8 import ActivationRanges
from as2ray.models.encoder.packed_attention import (
    SequenceLayout,
    copy_to_device,
    use_packed_attention,
)
from as2ray.models.encoder.pooling import mean_pool
from as2ray.models.encoder.shared_prefixes import LayerStates, split_states
from as2ray.text.packing import PackedBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LOCK = Lock()
"""Guards the fused layers, because several threads may rank with one encoder."""


class Encoder:
    """Embeddings and layers of a transformers model, for packed batches.

    It is a view: the modules stay in the model, under the names of its checkpoint.

    Args:
        base: A model of one of the `FAMILIES`, or a model with a head around one; or a BERT for
            fused inference only.

    Raises:
        CheckpointError: The model is of another family.
    """

    def __init__(self, base: "PreTrainedModel | InferenceBert") -> None:
        self.family, self.pooling = get_family(base.config), token_pooling(base.config)
        # DeBERTa's layers call one attention of their own
        if self.family.positions != "relative" and not isinstance(base, InferenceBert):
            use_packed_attention(base)
        base = cast(Any, base.base_model)
        self.embeddings = getattr(base, self.family.embeddings)
        self.embedding_projection = _find_embedding_projection(base)
        self.layers = _list_layers(base)
        self.rotary_embedding = getattr(base, "rotary_emb", None)
        self.final_norm: nn.Module | None = getattr(base, self.family.final_norm or "", None)
        self.relative_encoder = base.encoder if self.family.positions == "relative" else None
        self.first_position = first_position(base.config)
        self.has_token_types = getattr(base.config, "type_vocab_size", 0) > 1
        self.gradient_checkpointing = False
        self._fused: FusedLayers | None = None
        self._num_fused_contexts = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the fused layers out of copies: weights in oneDNN's formats cannot be copied."""
        return {**vars(self), "_fused": None, "_num_fused_contexts": 0}

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
            current = self.layers, dtype, self._distances(), ranges
            if self._fused is None or not self._fused.is_current(*current):
                self._fused = FusedLayers(*current)
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
        arrays = np.stack([batch.token_ids, batch.token_types, batch.positions])
        ids, types, positions = copy_to_device(arrays, self.device).long()[:, None]
        inputs = {
            "token_type_ids": types if self.has_token_types else torch.zeros_like(types),
            "position_ids": positions + self.first_position,
        }
        inputs = {name: inputs[name] for name in self.family.embedding_inputs}
        is_fused = self._num_fused_contexts > 0 and self.device.type == "cpu"
        if is_fused and self.family.positions == "absolute" and "token_type_ids" in inputs:
            num_positions = int(batch.positions.max()) + self.first_position + 1
            hidden = _add_embeddings(self.embeddings, ids, num_positions, **inputs)
        else:
            hidden = self.embeddings(ids, **inputs)
        hidden = hidden if self.embedding_projection is None else self.embedding_projection(hidden)
        layout = SequenceLayout.from_lengths(batch.lengths, self.device, batch.prefixes)
        return hidden[0], layout

    @property
    def can_share_prefixes(self) -> bool:
        """Whether the states of a sequence's first tokens do not depend on its later ones."""
        return self.pooling == "last" and not any(
            getattr(layer.self_attn, "sliding_window", None) for layer in self.layers
        )

    def compute_prefixes(self, batch: PackedBatch) -> list[LayerStates]:
        """Returns the keys and values of each sequence in all layers, which others continue."""
        hidden, layout = self.embed(batch)
        recorded: LayerStates = {}
        self.run_layers(hidden, replace(layout, recorded=recorded), 0, len(self))
        return split_states(recorded, batch.lengths.tolist())

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
            end_layer: Index of the first layer not to run; by default all are run, and the final
                norm of a family that has one.
        """
        rotations = self._rotations(hidden, layout)
        if self._num_fused_contexts and self._fused is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                hidden = self._fused.run_layers(hidden, layout, start_layer, end_layer, rotations)
        else:
            states = hidden[None]
            for layer in self.layers[start_layer:end_layer]:
                states = self._run_layer(layer, states, layout, rotations)
            hidden = states[0]
        return self.normalize(hidden) if end_layer is None else hidden

    def _run_layer(
        self,
        layer: nn.Module,
        states: Tensor,
        layout: SequenceLayout,
        rotations: Mapping[str | None, tuple[Tensor, Tensor]],
    ) -> Tensor:
        if self.relative_encoder is not None:
            arguments = layer, states, layout, self._distances()
            if self.gradient_checkpointing and layer.training:
                return cast(Tensor, checkpoint(run_deberta_layer, *arguments, use_reentrant=False))
            return run_deberta_layer(*arguments)
        keywords: dict[str, Any] = {"layout": layout}
        if rotations:
            keywords["position_embeddings"] = rotations[getattr(layer, "attention_type", None)]
        if self.gradient_checkpointing and layer.training:
            keywords["use_reentrant"] = False
            return cast(Tensor, checkpoint(layer, states, attention_mask=None, **keywords))
        return cast(Tensor, layer(states, attention_mask=None, **keywords))

    def _rotations(
        self, hidden: Tensor, layout: SequenceLayout
    ) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Returns cosines and sines [1, tokens, head size] of the positions, by type of layer.

        Empty for families without rotary embeddings.
        """
        if self.rotary_embedding is None:
            return {}
        inputs = hidden[:0].float(), layout.positions[None]
        types = {getattr(layer, "attention_type", None) for layer in self.layers}
        return {
            kind: self.rotary_embedding(*inputs, *([] if kind is None else [kind]))
            for kind in types
        }

    def _distances(self) -> Tensor | None:
        """Returns DeBERTa's embeddings of distances, [distances, hidden]; None for others."""
        if self.relative_encoder is None:
            return None
        return cast(Tensor | None, self.relative_encoder.get_rel_embedding())

    def normalize(self, hidden: Tensor) -> Tensor:
        """Returns states after the final norm, which heads read; unchanged if there is none."""
        if self.final_norm is None:
            return hidden
        with torch.autocast(hidden.device.type, enabled=False):
            return cast(Tensor, self.final_norm(hidden.float()))

    def run_to_pooled(self, hidden: Tensor, layout: SequenceLayout, start_layer: int = 0) -> Tensor:
        """Returns what the family's head reads after all layers, shape [sequences, hidden].

        Args:
            hidden: Packed states before `start_layer`, shape [tokens, hidden].
            layout: Positions of the sequences in them.
            start_layer: Index of the first layer to run.
        """
        if self.pooling == "mean":
            return mean_pool(self.run_layers(hidden, layout, start_layer), layout)
        tokens = layout.first_tokens if self.pooling == "first" else layout.last_tokens
        return self.run_to_tokens(tokens, hidden, layout, start_layer)

    def run_to_tokens(
        self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout, start_layer: int = 0
    ) -> Tensor:
        """Returns states of some tokens after all layers and the final norm, shape [n, hidden].

        In `fused_inference` the last layer computes only these tokens.

        Args:
            token_index: Indices of the tokens, shape [n].
            hidden: Packed states before `start_layer`, shape [tokens, hidden].
            layout: Positions of the sequences in them.
            start_layer: Index of the first layer to run.
        """
        if self._num_fused_contexts and self._fused is not None and start_layer < len(self):
            rotations = self._rotations(hidden, layout)
            with torch.autocast(hidden.device.type, enabled=False):
                states = self._fused.run_to_tokens(
                    token_index, hidden, layout, start_layer, rotations
                )
        else:
            states = self.run_layers(hidden, layout, start_layer, len(self))[token_index]
        return self.normalize(states)


def _add_embeddings(
    embeddings: Any,
    ids: Tensor,
    num_positions: int,
    *,
    token_type_ids: Tensor,
    position_ids: Tensor,
) -> Tensor:
    """Returns what BERT's embeddings do, [1, tokens, embedding], in about half the time on a CPU.

    Token types and positions are added to one another before they are added to each token.
    """
    types = embeddings.token_type_embeddings.weight[:, None]
    offsets = (types + embeddings.position_embeddings.weight[:num_positions]).flatten(0, 1)
    states = functional.embedding(ids, embeddings.word_embeddings.weight)
    states.add_(functional.embedding(token_type_ids * num_positions + position_ids, offsets))
    norm = embeddings.LayerNorm
    return functional.layer_norm(states, states.shape[-1:], norm.weight, norm.bias, norm.eps)


def run_deberta_layer(
    layer: Any, states: Tensor, layout: SequenceLayout, distances: Tensor | None
) -> Tensor:
    """Runs a layer of DeBERTa with packed attention; states are [1, tokens, hidden]."""
    attention = layer.attention.self
    projections = (attention.query_proj, attention.key_proj, attention.value_proj)
    shape = (attention.num_attention_heads, -1)
    heads = [projection(states)[0].unflatten(-1, shape) for projection in projections]
    positions = PositionProjections.from_layer(attention, distances)
    attended = disentangled_attention(attention, heads, layout, positions)
    hidden = layer.attention.output(attended[None], states)
    return cast(Tensor, layer.output(layer.intermediate(hidden), hidden))


def _find_embedding_projection(base: Any) -> nn.Module | None:
    """Returns the map from embedding to hidden size, or None if the family has none."""
    encoder = getattr(base, "encoder", None)
    projection = getattr(encoder, "embedding_hidden_mapping_in", None)  # ALBERT
    return projection or getattr(base, "embeddings_project", None)  # ELECTRA


def _list_layers(base: Any) -> list[nn.Module]:
    """Returns the layers in the order they run; an ALBERT group is listed once per run."""
    layers = list(get_layers(base))
    if base.config.model_type != "albert":
        return layers
    num_layers = base.config.num_hidden_layers
    return [layers[int(i / (num_layers / len(layers)))] for i in range(num_layers)]


def build_encoder(config: "PretrainedConfig") -> "PreTrainedModel":
    """Builds an encoder with new weights and without a pooler."""
    from transformers import AutoModel

    options = {"add_pooling_layer": False} if get_family(config).has_pooler_option else {}
    network: PreTrainedModel = AutoModel.from_config(config, **options)
    return network


def copy_encoder_weights(source: "PreTrainedModel", target: "PreTrainedModel") -> None:
    """Copies an encoder's weights, without its pooler, into an encoder without a pooler.

    Args:
        source: An encoder, or a model with a head around one.
        target: An encoder that `build_encoder` built.
    """
    weights = source.base_model.state_dict().items()
    target.load_state_dict({k: v for k, v in weights if not k.startswith("pooler.")})


def truncate(model: "PreTrainedModel", num_layers: int) -> "PreTrainedModel":
    """Removes all but the first layers of a model, in place (the papers' 4- to 10-layer models).

    Raises:
        CheckpointError: The model has fewer layers, or is an ALBERT with several layer groups.
    """
    model_layers = model.config.num_hidden_layers
    if not 0 < num_layers <= model_layers:
        raise CheckpointError(f"num_layers={num_layers} is not from 1 to {model_layers}")
    if model.config.model_type != "albert":
        set_layers(model.base_model, get_layers(model.base_model)[:num_layers])
    elif num_layers < model_layers and model.config.num_hidden_groups > 1:
        raise CheckpointError(
            f"an ALBERT with {model.config.num_hidden_groups} layer groups cannot be truncated",
            fix="choose an ALBERT with num_hidden_groups=1",
        )
    set_depth(model.config, num_layers)
    return model


def set_depth(config: "PretrainedConfig", num_layers: int) -> None:
    """Sets the number of layers of a configuration, with the types of the remaining layers."""
    config.num_hidden_layers = num_layers
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = list(layer_types)[:num_layers]
