"""Each family packed equals transformers padded, on weights of which none is at its start."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
import transformers

from as2ray.cascade.cost import GATED_MODEL_TYPES, EncoderShape
from as2ray.errors import CheckpointError
from as2ray.models.encoder import encoder as encoder_module
from as2ray.models.encoder.encoder import Encoder, set_depth
from as2ray.models.encoder.families import FAMILIES, get_family, token_pooling
from as2ray.models.encoder.length_buckets import AttentionMask
from as2ray.models.encoder.packed_attention import SequenceLayout, packed_attention
from as2ray.models.pointwise import classify
from as2ray.text.packing import PackedBatch, TokenSequences

VOCABULARY = 90
LENGTHS = [128, 100, 100, 70, 66, 65, 64, 64, 64, 20, 7, 7, 1]
"""Repeated lengths, and lengths at and over 65, where ModernBERT's window begins to matter."""
TOLERANCE = 5e-6

SHAPES = {
    "modernbert": {"local_attention": 128},
    "deberta-v2": {"position_buckets": 16},
}
"""Settings in place of the tiny ones."""


def build(family: str, attention: str = "eager", **changes):
    """A random classifier of 4 layers, all weights of which are perturbed; always the same."""
    settings = {"num_hidden_layers": 4, "max_position_embeddings": 140, **SHAPES.get(family, {})}
    network = tiny.network_of(family, VOCABULARY, 1, **{**settings, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in network.parameters():
            weights.add_(torch.randn(weights.shape, generator=generator) * 0.1)
    if family != "deberta-v2":  # it has one attention of its own
        network.set_attn_implementation(attention)
    return network


def tokens(family: str) -> tuple[PackedBatch, dict[str, torch.Tensor]]:
    """Random sequences, packed, and the same padded on the right."""
    generator = np.random.default_rng(2)
    ids = [generator.integers(8, VOCABULARY, length) for length in LENGTHS]
    types = [np.arange(length) * 2 // max(1, length) for length in LENGTHS]
    flat = [np.concatenate(parts).astype(np.int32) for parts in (ids, types)]
    sequences = TokenSequences(*flat, np.array(LENGTHS, np.int32))
    order = np.arange(len(LENGTHS))
    config = tiny.config_of(family, VOCABULARY)
    padded = torch.full((len(LENGTHS), max(LENGTHS)), config.pad_token_id)
    padded_types, mask = torch.zeros_like(padded), torch.zeros_like(padded)
    for row, (row_ids, row_types) in enumerate(zip(ids, types)):
        padded[row, : len(row_ids)] = torch.from_numpy(row_ids)
        padded_types[row, : len(row_ids)] = torch.from_numpy(row_types)
        mask[row, : len(row_ids)] = 1
    inputs = {"input_ids": padded, "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = padded_types
    return sequences.pack(order, {"row": order}), inputs


@torch.no_grad()
def packed_logits(network, batch: PackedBatch) -> torch.Tensor:
    encoder = Encoder(network)
    return classify(network, encoder.run_to_pooled(*encoder.embed(batch)))


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    """Name of each family, also of those that other tests leave out."""
    return request.param


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_logits_equal_those_of_padded_sequences(family, attention):
    batch, inputs = tokens(family)
    with torch.no_grad():
        expected = build(family, attention)(**inputs).logits
    torch.testing.assert_close(
        packed_logits(build(family), batch), expected, atol=TOLERANCE, rtol=TOLERANCE
    )
    assert expected.std() > 0.05  # or anything would agree


@torch.no_grad()
def test_dropping_sequences_between_layers_leaves_the_rest_as_it_is(family):
    batch, _ = tokens(family)
    network = build(family)
    encoder = Encoder(network)
    expected = packed_logits(network, batch)
    hidden, layout = encoder.embed(batch)
    hidden = encoder.run_layers(hidden, layout, 0, 2)
    kept = np.flatnonzero(np.arange(len(batch)) % 3 != 1)
    token_sequence = np.repeat(np.arange(len(batch)), batch.lengths)
    hidden = hidden[torch.from_numpy(np.isin(token_sequence, kept))]
    layout = SequenceLayout.from_lengths(batch.lengths[kept], hidden.device)
    found = classify(network, encoder.run_to_pooled(hidden, layout, 2))
    torch.testing.assert_close(found, expected[kept], atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_fused_layers_equal_those_of_transformers(family):
    batch, _ = tokens(family)
    network = build(family)
    encoder = Encoder(network)
    expected = packed_logits(network, batch)
    with encoder.fused_inference(torch.float32):
        found = classify(network, encoder.run_to_pooled(*encoder.embed(batch)))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ["modernbert", "gte", "nomic_bert", "llama"])
@torch.no_grad()
def test_attention_in_one_pass_as_in_bf16_equals_that_of_transformers(family):
    batch, _ = tokens(family)
    heads = {"num_key_value_heads": build(family).config.num_attention_heads}
    network = build(family, **heads if family == "llama" else {})
    encoder = Encoder(network)
    expected = packed_logits(network, batch)
    with encoder.fused_inference(torch.bfloat16):
        assert all(layer.is_bucketed for layer in encoder._fused._distinct)
    with encoder.fused_inference(torch.float32):
        for layer in encoder._fused._distinct:
            layer.is_bucketed = True
        found = classify(network, encoder.run_to_pooled(*encoder.embed(batch)))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def difference(family: str, batch: PackedBatch | None = None, **changes) -> float:
    """Largest difference of packed logits to those of the family as it is."""
    own_batch, _ = tokens(family)
    expected = packed_logits(build(family), own_batch)
    found = packed_logits(build(family, **changes), batch or own_batch)
    return float((found - expected).abs().max())


def without_mask(monkeypatch, part: str) -> None:
    """Lets attention ignore a part of the mask."""
    original = AttentionMask.for_length

    def for_length(self, length, device):
        unmasked = {"sliding_window": None} if part == "window" else {"is_causal": False}
        return original(replace(self, **unmasked), length, device)

    monkeypatch.setattr(AttentionMask, "for_length", for_length)


def test_window_that_is_ignored_shows_above_65_tokens(monkeypatch):
    batch, _ = tokens("modernbert")
    network = build("modernbert")
    expected = packed_logits(network, batch)
    without_mask(monkeypatch, "window")
    changed = (packed_logits(network, batch) - expected).abs()[:, 0]
    is_long = torch.from_numpy(batch.lengths > 65)
    assert changed[is_long].max() > 1e-3
    assert changed[~is_long].max() < TOLERANCE


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_causality_that_is_ignored_shows(family, monkeypatch):
    batch, inputs = tokens(family)
    with torch.no_grad():
        expected = build(family)(**inputs).logits
    without_mask(monkeypatch, "causality")
    assert (packed_logits(build(family), batch) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_positions_without_their_offset_show(family, monkeypatch):
    monkeypatch.setattr(encoder_module, "first_position", lambda _: 0)
    network = build(family)
    batch, inputs = tokens(family)
    with torch.no_grad():
        expected = build(family)(**inputs).logits
    assert (packed_logits(network, batch) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["bert", "distilbert", "nomic_bert"])
def test_positions_over_the_whole_batch_are_seen(family):
    """Rotations are relative: logits alone would not tell them, so the positions are compared."""
    batch, _ = tokens(family)
    layout = SequenceLayout.from_lengths(batch.lengths, torch.device("cpu"))
    np.testing.assert_array_equal(layout.positions, batch.positions)
    assert layout.positions.tolist() == [i for length in LENGTHS for i in range(length)]


def test_layers_of_modernbert_are_rotated_by_their_type():
    network = build("modernbert")
    encoder = Encoder(network)
    batch, _ = tokens("modernbert")
    hidden, layout = encoder.embed(batch)
    rotations = encoder._rotations(hidden, layout)
    assert {layer.attention_type for layer in encoder.layers} == rotations.keys()
    cosines = [rotations[kind][0] for kind in ("full_attention", "sliding_attention")]
    assert (cosines[0] - cosines[1]).abs().max() > 0.1
    own = network.model.rotary_emb
    for kind, (cosine, sine) in rotations.items():
        positions = torch.from_numpy(batch.positions).long()[None]
        expected = own(hidden[None], positions, kind)
        torch.testing.assert_close((cosine, sine), expected)


def test_token_types_of_a_family_without_any_are_zeros():
    batch, _ = tokens("gte")
    network = build("gte", type_vocab_size=1)
    expected = packed_logits(network, replace(batch, token_types=batch.token_types * 0))
    assert batch.token_types.any()
    torch.testing.assert_close(packed_logits(network, batch), expected)


@pytest.mark.parametrize("argument", ["softcap", "s_aux"])
def test_attention_refuses_what_it_does_not_compute(argument):
    layout = SequenceLayout.from_lengths([2], torch.device("cpu"))
    states = [torch.zeros(1, 1, 2, 4)] * 3
    with pytest.raises(CheckpointError, match=f"attention with {argument}"):
        packed_attention(torch.nn.Identity(), *states, None, layout=layout, **{argument: 1.0})
    mask = torch.ones(1, 1, 2, 2)
    with pytest.raises(CheckpointError, match="attention_mask"):
        packed_attention(torch.nn.Identity(), *states, mask, layout=layout)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (AttentionMask(), None),
        (AttentionMask(sliding_window=3), None),
        (AttentionMask(sliding_window=2), [[1, 1, 0], [1, 1, 1], [0, 1, 1]]),
        (AttentionMask(is_causal=True), [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (AttentionMask(True, 2), [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
    ],
)
def test_mask_is_that_of_a_window_and_of_causality(mask, expected):
    allowed = mask.for_length(3, torch.device("cpu"))
    assert (None if allowed is None else allowed.int().tolist()) == expected


VARIANTS = {
    "v2": {"norm_rel_ebd": "none", "position_biased_input": True, "type_vocab_size": 2},
    "own projections": {"share_att_key": False},
    "without buckets": {"position_buckets": -1, "max_relative_positions": 40},
    "no queries": {"pos_att_type": ["c2p"], "share_att_key": False},
    "no keys": {"pos_att_type": ["p2c"], "share_att_key": False},
    "no distances": {"relative_attention": False, "pos_att_type": []},
    "small embeddings": {"embedding_size": 16},
}
"""Other settings of DeBERTa-v2, to each of which its attention must answer."""


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("is_fused", [False, True])
def test_deberta_of_other_settings_equals_transformers(changes, is_fused):
    batch, inputs = tokens("deberta-v2")
    network = build("deberta-v2", **changes)
    encoder = Encoder(network)
    if network.config.type_vocab_size:
        batch = replace(batch, token_types=batch.token_types * 0)
    with torch.no_grad():
        expected = build("deberta-v2", **changes)(**inputs).logits
        with encoder.fused_inference(torch.float32) if is_fused else nullcontext():
            found = classify(network, encoder.run_to_pooled(*encoder.embed(batch)))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_deberta_without_its_distances_shows():
    assert difference("deberta-v2", pos_att_type=["c2p"]) > 1e-2


@pytest.mark.parametrize("reason", [{"conv_kernel_size": 3}])
def test_deberta_with_a_convolution_is_refused_with_the_entry(reason):
    with pytest.raises(CheckpointError, match="conv_kernel_size=3"):
        Encoder(build("deberta-v2", **reason))


@pytest.mark.parametrize("length", [1, 5])
def test_operations_of_a_layer_are_those_of_its_matrices(family, length):
    network = build(family)
    layer = Encoder(network).layers[0]
    size = sum(weights.numel() for weights in layer.parameters() if weights.ndim == 2)
    shape = EncoderShape.from_config(network.config)
    counted = shape.layer_flops(np.array([length]))
    assert counted.item() == 2 * length * size + 4 * length**2 * 32
    assert (family in GATED_MODEL_TYPES) == (FAMILIES[family].positions == "rotary")


def test_bert_with_alibi_is_refused_with_the_entry():
    config = transformers.BertConfig(vocab_size=30, hidden_size=32)
    config.position_embedding_type = "alibi"
    with pytest.raises(CheckpointError, match="position_embedding_type='alibi'"):
        get_family(config)


def test_pooling_that_is_unknown_is_refused_with_the_entry():
    config = tiny.config_of("modernbert", VOCABULARY)
    config.__dict__["classifier_pooling"] = "max"
    with pytest.raises(CheckpointError, match="classifier_pooling='max'"):
        token_pooling(config)


def test_fewer_layers_have_fewer_types_of_layers():
    config = tiny.config_of("modernbert", VOCABULARY)
    set_depth(config, 2)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    assert len(transformers.AutoModel.from_config(config).layers) == 2


def test_every_family_has_tiny_models():
    assert set(FAMILIES) == set(tiny.FAMILIES)
