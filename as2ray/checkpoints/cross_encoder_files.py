"""Reads what sentence-transformers stores beside a cross-encoder: its modules and its activation.

A head that `modules.json` lists (Ettin's: first token, dense layer, activation, norm, dense layer)
becomes the head of transformers' `ModernBertForSequenceClassification`, which is the same function.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import cached_file

from as2ray.errors import CheckpointError
from as2ray.models.encoder.families import token_pooling
from as2ray.models.ranker import Activation

ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
"""What a score is, by the class of torch that `activation_fn` names."""

ACTIVATION_FUNCTIONS: dict[Activation, str] = {
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "identity": "torch.nn.modules.linear.Identity",
}
"""The function that `CrossEncoder` applies to logits, by the activation of a ranker."""

HEAD_ACTIVATIONS = {"GELU": "gelu", "ReLU": "relu", "Tanh": "tanh", "SiLU": "silu"}
"""`config.classifier_activation` for the class of torch that a dense layer's activation is."""

POOLING = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}
"""`config.classifier_pooling` by the pooling's mode, in new files and in old ones."""

EMBEDDING_MODULES = {"Transformer", "Pooling", "Normalize"}
"""Modules of a sentence encoder, whose network a ranker can start from."""

HEAD_MODULES = ["Transformer", "Pooling", "Dense", "LayerNorm", "Dense"]


class CheckpointFiles:
    """The files of a checkpoint in a folder, or on a hub.

    Args:
        name: A folder or a hub id.
        revision: `{"revision": ...}`, or empty.
    """

    def __init__(self, name: str, revision: dict[str, str]) -> None:
        self.name, self.revision = name, revision

    def find(self, path: str) -> Path | None:
        """Returns the path of a file, or None if the checkpoint has no such file."""
        optional = {
            "_raise_exceptions_for_missing_entries": False,
            "_raise_exceptions_for_connection_errors": False,
        }
        file = cached_file(self.name, path, **self.revision, **optional)
        return None if file is None else Path(file)

    def read_json(self, path: str) -> Any:
        """Returns the content of a JSON file, or an empty dict if there is none."""
        file = self.find(path)
        return {} if file is None else json.loads(file.read_text(encoding="utf-8"))

    def require(self, path: str) -> Path:
        """Returns the path of a file that `modules.json` needs.

        Raises:
            CheckpointError: The checkpoint has no such file.
        """
        file = self.find(path)
        if file is None:
            raise CheckpointError(f"{self.name}: modules.json names {path}, which is missing")
        return file


def read_activation(
    files: CheckpointFiles, config: Any, default: Activation = "sigmoid"
) -> Activation:
    """Returns what the scores of a checkpoint with one label are, and stores it in its config.

    As in sentence-transformers, the file `config_sentence_transformers.json` comes before
    `config.json`. Scores of two labels are probabilities.

    Args:
        files: The checkpoint.
        config: Its configuration.
        default: What the scores are if neither file says it.

    Raises:
        CheckpointError: The activation is another.
    """
    settings = files.read_json("config_sentence_transformers.json")
    if settings.get("default_prompt_name") and token_pooling(config) != "last":
        raise CheckpointError(
            f"{files.name}: default_prompt_name={settings['default_prompt_name']!r} puts a prompt "
            "before each pair, which as2ray does not do for an encoder"
        )
    declared = getattr(config, "sentence_transformers", None) or {}
    old = getattr(config, "sbert_ce_default_activation_function", None)
    name = settings.get("activation_fn") or declared.get("activation_fn") or old
    if config.num_labels != 1 or (name is None and default == "sigmoid"):
        return "sigmoid"
    name = name or ACTIVATION_FUNCTIONS[default]
    kind = name.rpartition(".")[2]
    if kind not in ACTIVATIONS or not name.startswith("torch."):
        raise CheckpointError(f"{files.name}: activation_fn={name!r} is none of {[*ACTIVATIONS]}")
    config.sentence_transformers = {**declared, "activation_fn": name}
    return ACTIVATIONS[kind]


@dataclass(frozen=True)
class ModuleHead:
    """The head that `modules.json` lists after the encoder."""

    dense: dict[str, torch.Tensor]
    norm: dict[str, torch.Tensor]
    classifier: dict[str, torch.Tensor]

    @classmethod
    def read(cls, files: CheckpointFiles, config: Any) -> "ModuleHead | None":
        """Reads the head, and describes it in the configuration; None if there is none.

        Raises:
            CheckpointError: The modules are others, lack files or have settings that as2ray does
                not run.
        """
        entries = files.read_json("modules.json") or []
        names = [entry["type"].rpartition(".")[2] for entry in entries]
        if set(names) <= EMBEDDING_MODULES:
            return None
        if names != HEAD_MODULES or config.model_type != "modernbert":
            raise CheckpointError(
                f"{files.name}: modules.json lists {', '.join(names)} on "
                f"model_type={config.model_type!r}; of such heads as2ray runs "
                f"{', '.join(HEAD_MODULES)} on 'modernbert'"
            )
        folders = [entry["path"] for entry in entries]
        pooling, dense, norm, classifier = (
            json.loads(files.require(f"{folder}/config.json").read_text(encoding="utf-8"))
            for folder in folders[1:]
        )
        prefix = "pooling_mode_"
        modes = pooling.get("pooling_mode") or [
            key.removeprefix(prefix) for key in pooling if key.startswith(prefix) and pooling[key]
        ]
        mode = modes if isinstance(modes, str) else ", ".join(modes)
        activation = dense["activation_function"].rpartition(".")[2]
        size = config.hidden_size
        expected: dict[str, tuple[object, object]] = {
            "pooling_mode": (mode if mode not in POOLING else "cls", "cls"),
            "out_features of the dense layer": (dense["out_features"], size),
            "use_residual": (bool(dense.get("use_residual", False)), False),
            "activation_function": (
                activation if activation not in HEAD_ACTIVATIONS else "GELU",
                "GELU",
            ),
            "dimension of the norm": (norm["dimension"], size),
            "norm_eps": (config.norm_eps, 1e-5),
            "out_features of the last layer": (classifier["out_features"], 1),
            "activation_function of the last layer": (
                classifier["activation_function"].rpartition(".")[2],
                "Identity",
            ),
        }
        for name, (value, needed) in expected.items():
            if value != needed:
                raise CheckpointError(
                    f"{files.name}: modules.json leads to {name}={value!r}, but as2ray runs "
                    f"{needed!r}"
                )
        config.num_labels, config.classifier_bias = 1, bool(dense["bias"])
        config.classifier_pooling = POOLING[mode]
        config.classifier_activation = HEAD_ACTIVATIONS[activation]
        weights = [load_file(files.require(f"{path}/model.safetensors")) for path in folders[2:]]
        return cls(*({k.partition(".")[2]: w for k, w in part.items()} for part in weights))

    @torch.no_grad()
    def load_into(self, network: Any) -> None:
        """Copies the head into a `ModernBertForSequenceClassification`.

        Where its norm has no bias, the bias moves behind the last product: W(x + b) + c =
        Wx + (Wb + c).
        """
        head, classifier = network.head, network.classifier
        bias = self.classifier.get("bias", torch.zeros(1))
        head.dense.load_state_dict(self.dense)
        head.norm.weight.copy_(self.norm["weight"])
        if head.norm.bias is None:
            bias = bias + self.classifier["weight"] @ self.norm["bias"]
        else:
            head.norm.bias.copy_(self.norm["bias"])
        classifier.weight.copy_(self.classifier["weight"])
        classifier.bias.copy_(bias)
