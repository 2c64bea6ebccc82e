"""A prefix that is computed once per question changes no score, and saves its operations."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from as2ray.checkpoints.loading import load
from as2ray.models.encoder.encoder import Encoder
from as2ray.training.frozen_cascade import CascadeConfig, make_cascade

QUESTIONS, EACH = 3, 6
TABLE = tiny.with_distinct_questions(tiny.candidates(QUESTIONS, each=EACH))
TEXTS = TABLE["question"].to_pylist(), TABLE["candidate"].to_pylist()
QUESTION_INDEX = np.repeat(np.arange(QUESTIONS), EACH)
SIZES = {"max_position_embeddings": 600, "initializer_range": 0.3}


@pytest.fixture(params=["qwen3", "qwen2", "gemma"])
def ranker(checkpoint, request):
    loaded = load(checkpoint(request.param, 1, **SIZES), dtype="fp32", device="cpu")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weights in loaded.network.parameters():
            weights.add_(torch.randn(weights.shape, generator=generator) * 0.1)
    return loaded


def logits(ranker, sequences) -> np.ndarray:
    return ranker.predict_logits(ranker.pack(sequences), len(sequences))[:, 1]


@pytest.mark.parametrize("is_fused", [False, True])
def test_scores_with_shared_prefixes_are_those_of_whole_sequences(ranker, is_fused):
    ranker.use_fused_layers = is_fused
    sequences = ranker.tokenizer.encode(*TEXTS)
    assert len(sequences.prefixes.lengths) == QUESTIONS
    shared = logits(ranker, sequences)
    whole = logits(ranker, replace(sequences, prefixes=None))
    np.testing.assert_allclose(shared, whole, atol=2e-5)
    assert np.std(whole) > 0.05


def test_long_candidates_and_single_ones_stay_whole(ranker, monkeypatch):
    sequences = ranker.tokenizer.encode(*TEXTS)
    assert ranker.share_prefixes(sequences) is not sequences
    single = sequences.take(np.arange(0, QUESTIONS * EACH, EACH))
    assert ranker.share_prefixes(single) is single
    monkeypatch.setattr("as2ray.models.packed_ranker.MAX_CONTINUED_TOKENS", 20)
    assert ranker.share_prefixes(sequences) is sequences


def test_prefixes_in_several_parts_are_those_of_one(ranker, monkeypatch):
    sequences = ranker.tokenizer.encode(*TEXTS)
    expected = logits(ranker, sequences)
    longest = int(sequences.prefixes.lengths.max())
    monkeypatch.setattr("as2ray.models.packed_ranker.MAX_PREFIX_TOKENS", 2 * longest)
    assert len(list(ranker.pack(sequences))) == 2
    np.testing.assert_allclose(logits(ranker, sequences), expected, atol=2e-5)


def test_position_behind_a_prefix_that_is_ignored_shows(ranker, monkeypatch):
    sequences = ranker.tokenizer.encode(*TEXTS)
    expected = logits(ranker, sequences)
    monkeypatch.setattr(
        "as2ray.models.encoder.packed_attention.SequenceLayout.positions",
        property(lambda self: torch.arange(self.num_tokens)),
    )
    assert np.abs(logits(ranker, sequences) - expected).max() > 1e-2


def test_prefixes_are_computed_once_per_question(checkpoint):
    ranker = load(checkpoint("qwen3", 1, **SIZES), dtype="fp32", device="cpu")
    ranker.use_fused_layers = False
    sequences = ranker.tokenizer.encode(*TEXTS)

    passed = []
    for layer in ranker.encoder.layers:
        layer.register_forward_hook(lambda *call: passed.append(call[2].shape[1]))
    logits(ranker, sequences)
    prefix_lengths, index = sequences.prefixes.lengths, sequences.prefixes.index
    num_tokens = int(sequences.lengths.sum() - prefix_lengths[index].sum() + prefix_lengths.sum())
    assert sum(passed) == num_tokens * len(ranker.encoder)
    assert num_tokens < sequences.lengths.sum() / 3


@pytest.mark.parametrize("is_fused", [False, True])
def test_cascade_drops_the_same_candidates_with_shared_prefixes(ranker, is_fused, monkeypatch):
    config = CascadeConfig(exit_layers=(1, 2, 3), drop_ratios=(0.3, 0.3), epochs=1)
    cascade = make_cascade(ranker, TABLE, config=config)
    cascade.use_fused_layers = is_fused
    assert [head.pooling for head in list(cascade.network.heads)[:-1]] == ["last", "last"]
    sequences = cascade.tokenizer.encode(*TEXTS)
    shared = cascade.predict_sequences(sequences, QUESTION_INDEX)
    whole = cascade.predict_sequences(replace(sequences, prefixes=None), QUESTION_INDEX)
    np.testing.assert_array_equal(shared.stage_index, whole.stage_index)
    np.testing.assert_allclose(shared.scores, whole.scores, atol=2e-5)
    assert set(shared.stage_index) == {0, 1, 2}


def test_window_forbids_sharing():
    settings = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    network = tiny.network_of("qwen3", 90, 1, **settings)
    assert not Encoder(network).can_share_prefixes
    assert Encoder(tiny.network_of("qwen3", 90, 1)).can_share_prefixes
