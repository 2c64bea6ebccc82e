"""Checkpoints that need code of their own are refused with the entry that says so."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from as2ray.checkpoints.loading import load
from as2ray.errors import CheckpointError, ConfigError

QUESTION, TEXTS = "What is kovarin?", ["Badesso.", "Kovarin ne kovarin.", "Lala muri."]


@pytest.fixture
def changed(checkpoint, tmp_path):
    """Copies a checkpoint with other entries in its configuration: `changed(family, **entries)`."""

    def make(family, **entries):
        path = shutil.copytree(checkpoint(family, 1), tmp_path / "changed")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **entries}))
        return path

    return make


REMOTE = {"AutoModelForSequenceClassification": "modeling.OwnModel", "AutoConfig": "modeling.Own"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "own", "auto_map": REMOTE}, "auto_map names.*modeling.OwnModel"),
        (
            {"position_embedding_type": "alibi", "auto_map": REMOTE},
            "position_embedding_type='alibi'",
        ),
        ({"model_type": "own", "auto_map": ["modeling.OwnModel"]}, "auto_map names.*OwnModel"),
        ({"architectures": ["JinaForRanking"]}, "architectures='JinaForRanking'.*listwise"),
        ({"architectures": "JinaForRanking"}, "architectures='JinaForRanking' is no list"),
        ({"num_labels": 3}, "num_labels=3|classifier"),
        ({"model_type": "new", "layer_norm_type": "rms_norm"}, "layer_norm_type='rms_norm'"),
        ({"model_type": "new", "logn_attention_scale": True}, "logn_attention_scale=True"),
    ],
)
def test_checkpoint_that_needs_other_code_is_refused_with_the_entry(changed, entries, message):
    with pytest.raises(CheckpointError, match=message):
        load(changed("bert", **entries))


def test_length_beyond_the_positions_is_refused_with_the_entry(checkpoint):
    with pytest.raises(
        ConfigError, match=r"max_position_embeddings=66\)\n.* a max_length of at most 66"
    ):
        load(checkpoint("modernbert"), max_length=67)


def test_remote_code_of_a_family_that_transformers_has_is_not_run(changed, checkpoint):
    path = changed("bert", auto_map=REMOTE)
    (path / "modeling.py").write_text("raise SystemExit('remote code ran')")
    assert load(path).rank(QUESTION, TEXTS) == load(checkpoint("bert", 1)).rank(QUESTION, TEXTS)


def test_checkpoint_of_the_type_new_is_read_as_gte(checkpoint, tmp_path):
    """As Alibaba's gte-multilingual-reranker-base is published: other names, joined weights."""
    path = shutil.copytree(checkpoint("gte", 1), tmp_path / "new")
    config = json.loads((path / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    published = {
        "model_type": "new",
        "architectures": ["NewForSequenceClassification"],
        "auto_map": {"AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig"},
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "rope_theta": theta,
    }
    (path / "config.json").write_text(json.dumps({**config, **published}))
    weights = load_file(path / "model.safetensors")
    save_file(_published_names(weights), path / "model.safetensors", {"format": "pt"})
    expected = load(checkpoint("gte", 1), dtype="fp32", device="cpu")
    ranker = load(path, dtype="fp32", device="cpu")
    pairs = [QUESTION] * len(TEXTS), TEXTS
    np.testing.assert_allclose(ranker.predict_exits(*pairs), expected.predict_exits(*pairs))
    assert isinstance(ranker.network, transformers.GteForSequenceClassification)
    own = dict(expected.network.named_parameters())
    for name, value in ranker.network.named_parameters():
        torch.testing.assert_close(value, own[name])


def _published_names(weights):
    """Returns weights under the names of the architecture "new"."""
    if any(name.startswith("new.") for name in weights):
        return weights  # transformers wrote them so
    renamed = {}
    for name, value in weights.items():
        new = name.replace("gte.", "new.").replace(".layers.", ".encoder.layer.")
        new = new.replace("self_attn.o_proj", "attention.o_proj")
        new = new.replace("post_attention_layernorm", "attn_ln")
        new = new.replace("post_mlp_layernorm", "mlp_ln")
        renamed[new] = value
    for name in [name for name in renamed if "self_attn.q_proj" in name]:
        parts = [renamed.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        renamed[name.replace("self_attn.q_proj", "attention.qkv_proj")] = torch.cat(parts)
    for name in [name for name in renamed if "mlp.up_proj" in name]:
        parts = [renamed.pop(name.replace("up_proj", f"{x}_proj")) for x in ("up", "gate")]
        renamed[name.replace("up_proj", "up_gate_proj")] = torch.cat(parts)
    return renamed
