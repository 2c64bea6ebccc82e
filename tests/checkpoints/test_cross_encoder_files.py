"""What sentence-transformers' files say of a score, read without it."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, ModernBertConfig, Qwen2Config

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


def test_file_of_a_model_that_a_hub_out_of_reach_has_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert CheckpointFiles("org/model", {}).find("modules.json") is None
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "modules.json").write_text("[]")
    assert CheckpointFiles("org/model", {"revision": "a" * 40}).read_json("modules.json") == []
    assert CheckpointFiles("org/model", {"revision": "a" * 40}).find("README.md") is None


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


MODULES = {
    "1_Pooling": {"pooling_mode": "mean"},
    "2_Dense": {
        **{"in_features": 8, "out_features": 8, "bias": False},
        "activation_function": "torch.nn.modules.activation.SiLU",
    },
    "3_LayerNorm": {"dimension": 8},
    "4_Dense": {"in_features": 8, "out_features": 1, "activation_function": IDENTITY},
}
OLD_POOLING = {
    "pooling_mode": None,
    "pooling_mode_cls_token": True,
    "pooling_mode_mean_tokens": False,
    "word_embedding_dimension": 8,
}


@pytest.fixture
def modules(tmp_path):
    """Writes a checkpoint whose modules are a head: `modules({"2_Dense": {"bias": True}})`."""

    def make(changes=None) -> CheckpointFiles:
        entries = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
        for name, values in MODULES.items():
            kind = name.partition("_")[2]
            entries.append({"path": name, "type": f"sentence_transformers.models.{kind}"})
            (tmp_path / name).mkdir()
            content = {**values, **(changes or {}).get(name, {})}
            (tmp_path / name / "config.json").write_text(json.dumps(content))
            weights = {f"{kind.lower()}.weight": torch.full((1,), float(len(entries)))}
            save_file(weights, tmp_path / name / "model.safetensors")
        (tmp_path / "modules.json").write_text(json.dumps(entries))
        return CheckpointFiles(str(tmp_path), {})

    return make


@pytest.mark.parametrize(
    ("changes", "entries"),
    [
        ({}, {"classifier_pooling": "mean", "classifier_activation": "silu"}),
        ({"1_Pooling": {"pooling_mode": "cls"}}, {"classifier_pooling": "cls"}),
        ({"1_Pooling": OLD_POOLING}, {}),
        ({"2_Dense": {"bias": True, "use_residual": False}}, {"classifier_bias": True}),
        ({"2_Dense": {"activation_function": "torch.nn.Tanh"}}, {"classifier_activation": "tanh"}),
    ],
)
def test_head_of_modules_is_described_in_the_configuration(modules, changes, entries):
    config = ModernBertConfig(hidden_size=8, num_labels=3)
    head = ModuleHead.read(modules(changes), config)
    parts = [head.dense, head.norm, head.classifier]
    assert [{name: float(w) for name, w in part.items()} for part in parts] == [
        {"weight": number} for number in (3.0, 4.0, 5.0)
    ]
    expected = {"num_labels": 1, "classifier_bias": False, **entries}
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"1_Pooling": {"pooling_mode": "max"}}, "pooling_mode='max', but as2ray runs 'cls'"),
        (
            {"1_Pooling": {"pooling_mode": None, "pooling_mode_cls_token": 1, "pooling_mode_x": 1}},
            "pooling_mode='cls_token, x'",
        ),
        ({"2_Dense": {"out_features": 4}}, "out_features of the dense layer=4, but as2ray runs 8"),
        ({"2_Dense": {"use_residual": True}}, "use_residual=True, but as2ray runs False"),
        (
            {"2_Dense": {"activation_function": "torch.nn.Softplus"}},
            "activation_function='Softplus', but as2ray runs 'GELU'",
        ),
        ({"3_LayerNorm": {"dimension": 4}}, "dimension of the norm=4, but as2ray runs 8"),
        ({"4_Dense": {"out_features": 2}}, "out_features of the last layer=2, but as2ray runs 1"),
        (
            {"4_Dense": {"activation_function": SIGMOID}},
            "activation_function of the last layer='Sigmoid', but as2ray runs 'Identity'",
        ),
    ],
)
def test_head_of_modules_with_another_setting_is_refused_by_its_name(modules, changes, problem):
    with pytest.raises(CheckpointError, match=f"leads to {problem}"):
        ModuleHead.read(modules(changes), ModernBertConfig(hidden_size=8))


def test_head_of_modules_needs_a_modernbert_with_the_norm_of_its_layer(modules):
    files = modules()
    with pytest.raises(CheckpointError, match=r"norm_eps=0\.5, but as2ray runs 1e-05"):
        ModuleHead.read(files, ModernBertConfig(hidden_size=8, norm_eps=0.5))
    listed = "lists Transformer, Pooling, Dense, LayerNorm, Dense on model_type='bert'"
    with pytest.raises(CheckpointError, match=listed):
        ModuleHead.read(files, BertConfig(hidden_size=8))


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
