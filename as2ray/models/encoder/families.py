"""The supported architectures of transformers: how each embeds, positions, masks and pools.

Everything that differs between families and is not read from a model's own modules stands in
`FAMILIES`. A family's layers run as transformers wrote them, except DeBERTa's attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from as2ray.errors import CheckpointError

TokenPooling = Literal["first", "mean", "last"]
"""What a head reads: the first token's state, the mean of all states, or the last token's state."""

Head = Callable[[Any, Tensor], Tensor]
"""Maps a `...ForSequenceClassification` model and pooled states [n, hidden] to logits."""


def _bert_head(network: Any, pooled: Tensor) -> Tensor:
    pooled = network.base_model.pooler(pooled[:, None])  # poolers read token 0 of each sequence
    return network.classifier(network.dropout(pooled))  # type: ignore[no-any-return]


def _albert_head(network: Any, pooled: Tensor) -> Tensor:
    pooled = network.base_model.pooler_activation(network.base_model.pooler(pooled))
    return network.classifier(network.dropout(pooled))  # type: ignore[no-any-return]


def _roberta_head(network: Any, pooled: Tensor) -> Tensor:
    return network.classifier(pooled[:, None])  # type: ignore[no-any-return]


def _distilbert_head(network: Any, pooled: Tensor) -> Tensor:
    pooled = torch.relu(network.pre_classifier(pooled))
    return network.classifier(network.dropout(pooled))  # type: ignore[no-any-return]


def _modernbert_head(network: Any, pooled: Tensor) -> Tensor:
    return network.classifier(network.drop(network.head(pooled)))  # type: ignore[no-any-return]


def _deberta_head(network: Any, pooled: Tensor) -> Tensor:
    pooled = network.pooler(pooled[:, None])
    return network.classifier(network.dropout(pooled))  # type: ignore[no-any-return]


def _decoder_head(network: Any, pooled: Tensor) -> Tensor:
    return network.score(pooled)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Family:
    """How the models of one `config.model_type` run over packed batches. The defaults are BERT's.

    Masks are not listed: an attention module says itself whether it is causal and has a window.
    """

    head: Head = _bert_head
    """The head of `...ForSequenceClassification`."""
    layers: str = "encoder.layer"
    """Name of the list of layers in the base model."""
    embeddings: str = "embeddings"
    """Name of the embeddings in the base model."""
    embedding_inputs: tuple[str, ...] = ("token_type_ids", "position_ids")
    """What the embeddings read besides the token ids."""
    positions: Literal["absolute", "rotary", "relative"] = "absolute"
    """Where positions enter: into the embeddings; into queries and keys, which are rotated; or into
    the attention scores, by distance (DeBERTa)."""
    starts_after_padding_id: bool = False
    """Whether the first position is the padding id + 1 instead of 0."""
    final_norm: str | None = None
    """Name of the norm after the last layer (pre-norm families)."""
    pooling: TokenPooling | Literal["config"] = "first"
    """What the head reads; `config`: as `config.classifier_pooling` says."""
    has_pooler_option: bool = True
    """Whether the base model takes `add_pooling_layer`."""
    dropout: str = "hidden_dropout_prob"
    """Entry of the configuration for the dropout of dense layers; none counts as 0."""
    has_linear_head: bool = True
    """Whether `...ForTokenClassification` has one linear layer and no more."""


_ROBERTA = Family(_roberta_head, starts_after_padding_id=True)
_ROTARY = Family(layers="layers", positions="rotary")
_DECODER = Family(
    _decoder_head,
    layers="layers",
    embeddings="embed_tokens",
    embedding_inputs=(),
    positions="rotary",
    final_norm="norm",
    pooling="last",
    has_pooler_option=False,
    has_linear_head=False,
)

FAMILIES: dict[str, Family] = {
    "bert": Family(),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "electra": Family(_roberta_head, has_pooler_option=False),
    "albert": Family(_albert_head, layers="encoder.albert_layer_groups"),
    "distilbert": Family(
        _distilbert_head,
        layers="transformer.layer",
        embedding_inputs=("position_ids",),
        has_pooler_option=False,
        dropout="dropout",
    ),
    "modernbert": Family(
        _modernbert_head,
        layers="layers",
        embedding_inputs=(),
        positions="rotary",
        final_norm="final_norm",
        pooling="config",
        has_pooler_option=False,
        dropout="mlp_dropout",
        has_linear_head=False,
    ),
    "gte": _ROTARY,
    "nomic_bert": _ROTARY,
    "deberta-v2": Family(_deberta_head, positions="relative", has_pooler_option=False),
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gemma": _DECODER,
    "llama": _DECODER,
}
"""The supported families, by `config.model_type`."""


def get_family(config: Any) -> Family:
    """Returns the family of a model.

    Raises:
        CheckpointError: It is not supported, or the configuration asks for other positions.
    """
    if config.model_type not in FAMILIES:
        raise CheckpointError(f"model_type={config.model_type!r} is none of {sorted(FAMILIES)}")
    family = FAMILIES[config.model_type]
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if family.positions == "absolute" and kind != "absolute":
        raise CheckpointError(
            f"position_embedding_type={kind!r} needs code of its own, which as2ray does not run; "
            f"a {config.model_type!r} model has absolute positions"
        )
    if getattr(config, "conv_kernel_size", 0):
        raise CheckpointError(
            f"conv_kernel_size={config.conv_kernel_size} adds a convolution over tokens, which "
            "as2ray does not run"
        )
    return family


def token_pooling(config: Any) -> TokenPooling:
    """Returns what a model's head reads.

    Raises:
        CheckpointError: `config.classifier_pooling` is unknown.
    """
    pooling = get_family(config).pooling
    if pooling != "config":
        return pooling
    names: dict[str, TokenPooling] = {"cls": "first", "mean": "mean"}
    if config.classifier_pooling not in names:
        raise CheckpointError(
            f"classifier_pooling={config.classifier_pooling!r} is none of {sorted(names)}"
        )
    return names[config.classifier_pooling]


def first_position(config: Any) -> int:
    """Returns the index of a sequence's first position."""
    return int(config.pad_token_id) + 1 if get_family(config).starts_after_padding_id else 0


def max_sequence_length(config: Any) -> int:
    """Returns the maximum number of tokens of a sequence, given by the encoder's positions."""
    return int(config.max_position_embeddings) - first_position(config)


def dense_dropout(config: Any) -> float:
    """Returns the dropout of an encoder's dense layers, which new heads take over."""
    return float(getattr(config, get_family(config).dropout, 0.0))


def get_layers(base: Any) -> nn.ModuleList:
    """Returns the list of layers of a base model."""
    layers: nn.ModuleList = attrgetter(get_family(base.config).layers)(base)
    return layers


def set_layers(base: Any, layers: nn.ModuleList | None) -> None:
    """Replaces the list of layers of a base model."""
    *path, name = get_family(base.config).layers.split(".")
    setattr(attrgetter(".".join(path))(base) if path else base, name, layers)


def apply_head(network: Any, pooled: Tensor) -> Tensor:
    """Returns logits [n, labels] of a network's own head, of pooled states [n, hidden]."""
    return get_family(network.config).head(network, pooled)
