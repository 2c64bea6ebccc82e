"""What sentence-transformers' files say of a score, read without it."""

import json

import pytest
import torch
from transformers import BertConfig, Qwen2Config

from as2ray.checkpoints.cross_encoder_files import CheckpointFiles, ModuleHead, read_activation
from as2ray.errors import CheckpointError

IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.fixture
def files(tmp_path):
    """The files of a folder: `files(activation_fn=…)` writes that of sentence-transformers."""

    def make(**settings) -> CheckpointFiles:
        path = tmp_path / "config_sentence_transformers.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return CheckpointFiles(str(tmp_path), {})

    return make


def test_file_that_is_not_there_is_none_and_an_empty_object(tmp_path):
    files = CheckpointFiles(str(tmp_path), {})
    assert files.find("modules.json") is None
    assert files.read_json("modules.json") == {}
    with pytest.raises(CheckpointError, match=r"names 1_Dense/config\.json, which is missing"):
        files.require("1_Dense/config.json")
    (tmp_path / "modules.json").write_text('{"name": "Brücke"}', encoding="utf-8")
    assert files.find("modules.json") == files.require("modules.json") == tmp_path / "modules.json"
    assert files.read_json("modules.json") == {"name": "Brücke"}


@pytest.mark.parametrize(
    ("settings", "entries", "default", "activation", "stored"),
    [
        ({}, {}, "sigmoid", "sigmoid", None),
        ({}, {}, "identity", "identity", {"activation_fn": IDENTITY}),
        ({"activation_fn": SIGMOID}, {}, "identity", "sigmoid", {"activation_fn": SIGMOID}),
        ({"activation_fn": IDENTITY}, {}, "sigmoid", "identity", {"activation_fn": IDENTITY}),
        (
            {"activation_fn": IDENTITY},
            {"sentence_transformers": {"activation_fn": SIGMOID, "version": "5.0"}},
            "sigmoid",
            "identity",
            {"activation_fn": IDENTITY, "version": "5.0"},
        ),
        (
            {},
            {
                "sentence_transformers": {"activation_fn": IDENTITY},
                "sbert_ce_default_activation_function": SIGMOID,
            },
            "sigmoid",
            "identity",
            {"activation_fn": IDENTITY},
        ),
        (
            {},
            {"sbert_ce_default_activation_function": IDENTITY},
            "sigmoid",
            "identity",
            {"activation_fn": IDENTITY},
        ),
    ],
)
def test_activation_is_that_of_the_first_file_that_says_it_and_is_stored(
    files, settings, entries, default, activation, stored
):
    config = BertConfig(num_labels=1, **entries)
    assert read_activation(files(**settings), config, default) == activation
    assert getattr(config, "sentence_transformers", None) == stored


def test_scores_of_two_labels_are_probabilities_whatever_the_files_say(files):
    config = BertConfig(num_labels=2)
    assert read_activation(files(activation_fn=IDENTITY), config, "identity") == "sigmoid"
    assert not hasattr(config, "sentence_transformers")


@pytest.mark.parametrize("name", ["torch.nn.ReLU", "my.package.Sigmoid", "Identity"])
def test_other_activations_are_refused_by_name(files, name):
    with pytest.raises(CheckpointError, match=f"activation_fn='{name}' is none of"):
        read_activation(files(activation_fn=name), BertConfig(num_labels=1))


def test_prompt_before_each_pair_is_refused_of_an_encoder_and_left_to_a_decoder(files):
    settings = files(default_prompt_name="query")
    with pytest.raises(CheckpointError, match="default_prompt_name='query' puts a prompt"):
        read_activation(settings, BertConfig(num_labels=1))
    assert read_activation(settings, Qwen2Config(num_labels=1), "identity") == "identity"
    assert read_activation(files(default_prompt_name=None), BertConfig(num_labels=1)) == "sigmoid"


@pytest.mark.parametrize("names", [[], ["Transformer"], ["Transformer", "Pooling", "Normalize"]])
def test_modules_of_a_sentence_encoder_have_no_head(tmp_path, names):
    entries = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in names]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    config = BertConfig(num_labels=3)
    assert ModuleHead.read(CheckpointFiles(str(tmp_path), {}), config) is None
    assert config.num_labels == 3


@pytest.mark.parametrize("has_bias", [False, True])
def test_bias_of_a_norm_without_one_moves_behind_the_last_product(has_bias):
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    head = ModuleHead(
        {"weight": draw(4, 4)},
        {"weight": draw(4), "bias": draw(4)},
        {"weight": draw(1, 4), **({"bias": draw(1)} if has_bias else {})},
    )
    states = draw(3, 4)
    hidden = torch.nn.functional.layer_norm(states @ head.dense["weight"].T, [4])
    expected = (hidden * head.norm["weight"] + head.norm["bias"]) @ head.classifier["weight"].T
    expected += head.classifier.get("bias", 0)
    for norm_bias in (False, True):
        network = torch.nn.Module()
        network.head, network.classifier = torch.nn.Module(), torch.nn.Linear(4, 1)
        network.head.dense = torch.nn.Linear(4, 4, bias=False)
        network.head.norm = torch.nn.LayerNorm(4, bias=norm_bias)
        head.load_into(network)
        found = network.classifier(network.head.norm(network.head.dense(states)))
        torch.testing.assert_close(found, expected)
