"""A BERT that only fused layers run, built without transformers, whose models load for seconds."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

UNUSED_WEIGHTS = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
"""Weights of a checkpoint that a sentence encoder does not use."""

EXPECTED = {
    "model_type": (None, "bert"),
    "hidden_act": ("gelu", "gelu"),
    "is_decoder": (False, False),
    "position_embedding_type": ("absolute", "absolute"),
}
"""Default and required value of entries of `config.json`."""


class GELUActivation(nn.GELU):
    """The exact GELU, under the name that transformers gives it."""


class InferenceBert(nn.Module):
    """The modules of transformers' `BertModel` without its pooler, under the same names.

    Its layers are weights only: `Encoder.fused_inference` runs them.

    Args:
        config: The content of `config.json`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(**config)
        self.embeddings = _BertEmbeddings(self.config)
        layers = [_build_layer(self.config) for _ in range(self.config.num_hidden_layers)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})

    @classmethod
    def from_weights(
        cls, config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> "InferenceBert | None":
        """Returns the network; None if transformers might read the checkpoint otherwise.

        Args:
            config: The content of `config.json`.
            weights: The content of `model.safetensors`.
        """
        if any(config.get(name, default) != value for name, (default, value) in EXPECTED.items()):
            return None
        network = cls(config)
        used = {name: w.float() for name, w in weights.items() if name not in UNUSED_WEIGHTS}
        shapes = {name: w.shape for name, w in network.state_dict().items()}
        if {name: w.shape for name, w in used.items()} != shapes:
            return None
        network.load_state_dict(used, assign=True)
        return network.eval()

    @property
    def base_model(self) -> "InferenceBert":
        """The network itself: it has no head."""
        return self


class _Weights(nn.Module):
    """Weights and bias of a linear layer or a norm; initializing them would import sympy.

    Args:
        shape: Shape of the weights, the bias has that of the first axis.
        has_bias: Whether there is a bias.
        eps: Of a norm.
    """

    def __init__(self, *shape: int, has_bias: bool = True, eps: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if has_bias else None
        self.eps = eps


class _BertEmbeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = _Weights(config.vocab_size, size, has_bias=False)
        self.position_embeddings = _Weights(config.max_position_embeddings, size, has_bias=False)
        self.token_type_embeddings = _Weights(config.type_vocab_size, size, has_bias=False)
        self.LayerNorm = _Weights(size, eps=config.layer_norm_eps)

    def forward(self, ids: Tensor, *, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Returns states before the first layer, shape [1, tokens, hidden], of ids [1, tokens]."""
        tables = self.word_embeddings, self.token_type_embeddings, self.position_embeddings
        words, types, positions = (
            functional.embedding(index, table.weight)
            for index, table in zip((ids, token_type_ids, position_ids), tables)
        )
        norm, states = self.LayerNorm, words + types + positions
        return functional.layer_norm(states, states.shape[-1:], norm.weight, norm.bias, norm.eps)


def _build_layer(config: Any) -> nn.Module:
    size, inner_size = config.hidden_size, config.intermediate_size
    heads: Any = nn.ModuleDict({n: _Weights(size, size) for n in ("query", "key", "value")})
    heads.attention_head_size = size // config.num_attention_heads
    intermediate = {"dense": _Weights(inner_size, size), "intermediate_act_fn": GELUActivation()}
    return nn.ModuleDict(
        {
            "attention": nn.ModuleDict({"self": heads, "output": _build_output(size, config)}),
            "intermediate": nn.ModuleDict(intermediate),
            "output": _build_output(inner_size, config),
        }
    )


def _build_output(input_size: int, config: Any) -> nn.Module:
    size = config.hidden_size
    norm = _Weights(size, eps=config.layer_norm_eps)
    return nn.ModuleDict({"dense": _Weights(size, input_size), "LayerNorm": norm})
