"""The encoder as embeddings and a run of layers, over packed batches.

Knows transformers' BERT, RoBERTa, ELECTRA and ALBERT. Must not know heads, losses or files.

Everything in the papers runs *part* of an encoder: the first 4 layers, then 2 more for the
survivors; 11 shared layers, then 3 heads of one layer. So there are two verbs: `embed` and
`run(hidden, layout, first, last)`. The layers are transformers' own, not one line rewritten.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from as2ray.errors import CheckpointError
from as2ray.models.encoder.fused_layers import FusedLayers
from as2ray.models.encoder.packed_attention import ATTENTION_IMPLEMENTATION, SequenceLayout
from as2ray.text.packing import PackedBatch

MODEL_TYPES = ("bert", "roberta", "electra", "albert")
"""Values of `config.model_type` that are supported."""

_LOCK = Lock()
"""Several threads may rank with one encoder."""


class Encoder:
    """Embeddings and layers of a transformers model, for packed batches.

    A view: the modules stay the model's own, with the names its checkpoint gives them.

    Args:
        base: A `BertModel`, `RobertaModel`, `ElectraModel` or `AlbertModel`, or a model with a
            head around one.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        family = base.config.model_type
        if family not in MODEL_TYPES:
            raise CheckpointError(
                f"an encoder of type {family!r}; expected one of {MODEL_TYPES}",
                fix="choose another checkpoint",
            )
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
    def fused_inference(self, dtype: torch.dtype) -> Iterator[None]:
        """Runs fused layers in a number format inside: for inference alone, in any threads."""
        with _LOCK:
            if self._fused is None or not self._fused.is_current(self.layers, dtype):
                self._fused = FusedLayers(self.layers, dtype)
            self._num_fused_contexts += 1
        try:
            yield
        finally:
            with _LOCK:
                self._num_fused_contexts -= 1

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.layers[0].parameters()).device
        return device

    def embed(self, batch: PackedBatch) -> tuple[Tensor, SequenceLayout]:
        """Hidden states before the first layer, shape [tokens, hidden], and their layout."""
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
        """Hidden states after layers `first` to `last` - 1 (all that are left, by default).

        Args:
            hidden: Shape [tokens, hidden].
            layout: Where the sequences lie in it.
            first: Number of the first layer to run, from 0.
            last: Number of the first layer not to run.
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
        """States of each sequence's first token after all layers, shape [sequences, hidden].

        Args:
            hidden: Shape [tokens, hidden], before the first layer.
            layout: Where the sequences lie in it.
        """
        return self.run_to_tokens(layout.first_tokens, hidden, layout)

    def run_to_tokens(self, token_index: Tensor, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """States of some tokens after all layers, shape [n, hidden]; at rest no more is computed.

        Args:
            tokens: Numbers of the tokens, shape [n].
            hidden: Shape [tokens, hidden], before the first layer.
            layout: Where the sequences lie in it.
        """
        if self._num_fused_contexts and self._fused is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                return self._fused.run_to_tokens(token_index, hidden, layout)
        return self.run_layers(hidden, layout)[token_index]


def first_position(config: Any) -> int:
    """Number of a sequence's first position: RoBERTa counts from padding_idx + 1."""
    return int(config.pad_token_id) + 1 if config.model_type == "roberta" else 0


def max_sequence_length(config: Any) -> int:
    """Most tokens of a sequence that the encoder has positions for."""
    return int(config.max_position_embeddings) - first_position(config)


def _find_embedding_projection(base: Any) -> nn.Module | None:
    """The map from embedding to hidden size, where the family has one."""
    if hasattr(base.encoder, "embedding_hidden_mapping_in"):
        mapping: nn.Module = base.encoder.embedding_hidden_mapping_in
        return mapping
    return getattr(base, "embeddings_project", None)


def _list_layers(base: Any) -> list[nn.Module]:
    """The layers in the order they run; ALBERT's groups stand once for every time they run."""
    if not hasattr(base.encoder, "albert_layer_groups"):
        return list(base.encoder.layer)
    groups, layers = base.encoder.albert_layer_groups, base.config.num_hidden_layers
    return [groups[int(i / (layers / len(groups)))] for i in range(layers)]


def truncate(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Keeps the first `layers` layers of a model, in place (the papers' 4- to 10-layer models)."""
    held = model.config.num_hidden_layers
    if not 0 < num_layers <= held:
        raise CheckpointError(
            f"{num_layers} layers of an encoder that has {held}; expected 1 to {held} layers",
            fix="lower the number of layers",
        )
    encoder = model.base_model.encoder
    if hasattr(encoder, "layer"):
        encoder.layer = encoder.layer[:num_layers]
    elif num_layers < held and model.config.num_hidden_groups > 1:
        raise CheckpointError(
            f"an ALBERT of {model.config.num_hidden_groups} layer groups"
            "; expected one group, whose weights all layers share",
            fix="choose an ALBERT with num_hidden_groups=1",
        )
    model.config.num_hidden_layers = num_layers
    return model
