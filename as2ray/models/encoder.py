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
from as2ray.models.attention import NAME, Layout
from as2ray.models.fused import FusedLayers
from as2ray.text.packing import PackedBatch

FAMILIES = ("bert", "roberta", "electra", "albert")
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
        if family not in FAMILIES:
            raise CheckpointError(
                f"an encoder of type {family!r}",
                expected=f"one of {FAMILIES}",
                mend="choose another checkpoint",
            )
        base.set_attn_implementation(NAME)
        base = cast(Any, base.base_model)
        self.embeddings = base.embeddings
        self.project = _projection(base)
        self.layers = _layers(base)
        self.first_position = first_position(base.config)
        self.gradient_checkpointing = False
        self._fused: FusedLayers | None = None
        self._resting = 0

    @contextmanager
    def resting(self, dtype: torch.dtype) -> Iterator[None]:
        """Runs fused layers in a number format inside: for inference alone, in any threads."""
        with _LOCK:
            if self._fused is None or not self._fused.fits(self.layers, dtype):
                self._fused = FusedLayers(self.layers, dtype)
            self._resting += 1
        try:
            yield
        finally:
            with _LOCK:
                self._resting -= 1

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.layers[0].parameters()).device
        return device

    def embed(self, batch: PackedBatch) -> tuple[Tensor, Layout]:
        """Hidden states before the first layer, shape [tokens, hidden], and their layout."""
        ids, types, positions = (
            torch.from_numpy(x).to(self.device, torch.long, non_blocking=True)[None]
            for x in (batch.token_ids, batch.token_types, batch.positions)
        )
        positions = positions + self.first_position
        hidden = self.embeddings(ids, token_type_ids=types, position_ids=positions)
        hidden = hidden if self.project is None else self.project(hidden)
        return hidden[0], Layout.of(batch.lengths, self.device)

    def run(
        self, hidden: Tensor, layout: Layout, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Hidden states after layers `first` to `last` - 1 (all that are left, by default).

        Args:
            hidden: Shape [tokens, hidden].
            layout: Where the sequences lie in it.
            first: Number of the first layer to run, from 0.
            last: Number of the first layer not to run.
        """
        if self._resting and self._fused is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                return self._fused.run(hidden, layout, first, last)
        states = hidden[None]
        for layer in self.layers[first:last]:
            if self.gradient_checkpointing and layer.training:
                states = checkpoint(layer, states, None, layout=layout, use_reentrant=False)
            else:
                states = layer(states, None, layout=layout)
        return states[0]

    def run_to_first(self, hidden: Tensor, layout: Layout) -> Tensor:
        """States of each sequence's first token after all layers, shape [sequences, hidden].

        Args:
            hidden: Shape [tokens, hidden], before the first layer.
            layout: Where the sequences lie in it.
        """
        return self.run_to(layout.first_tokens, hidden, layout)

    def run_to(self, tokens: Tensor, hidden: Tensor, layout: Layout) -> Tensor:
        """States of some tokens after all layers, shape [n, hidden]; at rest no more is computed.

        Args:
            tokens: Numbers of the tokens, shape [n].
            hidden: Shape [tokens, hidden], before the first layer.
            layout: Where the sequences lie in it.
        """
        if self._resting and self._fused is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                return self._fused.run_to(tokens, hidden, layout)
        return self.run(hidden, layout)[tokens]


def first_position(config: Any) -> int:
    """Number of a sequence's first position: RoBERTa counts from padding_idx + 1."""
    return int(config.pad_token_id) + 1 if config.model_type == "roberta" else 0


def longest(config: Any) -> int:
    """Most tokens of a sequence that the encoder has positions for."""
    return int(config.max_position_embeddings) - first_position(config)


def _projection(base: Any) -> nn.Module | None:
    """The map from embedding to hidden size, where the family has one."""
    if hasattr(base.encoder, "embedding_hidden_mapping_in"):
        mapping: nn.Module = base.encoder.embedding_hidden_mapping_in
        return mapping
    return getattr(base, "embeddings_project", None)


def _layers(base: Any) -> list[nn.Module]:
    """The layers in the order they run; ALBERT's groups stand once for every time they run."""
    if not hasattr(base.encoder, "albert_layer_groups"):
        return list(base.encoder.layer)
    groups, layers = base.encoder.albert_layer_groups, base.config.num_hidden_layers
    return [groups[int(i / (layers / len(groups)))] for i in range(layers)]


def truncate(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Keeps the first `layers` layers of a model, in place (the papers' 4- to 10-layer models)."""
    held = model.config.num_hidden_layers
    if not 0 < layers <= held:
        raise CheckpointError(
            f"{layers} layers of an encoder that has {held}",
            expected=f"1 to {held} layers",
            mend="lower the number of layers",
        )
    encoder = model.base_model.encoder
    if hasattr(encoder, "layer"):
        encoder.layer = encoder.layer[:layers]
    elif layers < held and model.config.num_hidden_groups > 1:
        raise CheckpointError(
            f"an ALBERT of {model.config.num_hidden_groups} layer groups",
            expected="one group, whose weights all layers share",
            mend="choose an ALBERT with num_hidden_groups=1",
        )
    model.config.num_hidden_layers = layers
    return model
