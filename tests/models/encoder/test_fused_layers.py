import numpy as np
import pytest
import torch

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.models.encoder import fused_layers
from as2ray.models.ranker import Ranker

QUESTION = "What is kovarin?"


def scores(ranker: Ranker, texts: list[str], fused: bool) -> np.ndarray:
    ranker.use_fused_layers = fused
    return ranker.predict_pairs([QUESTION] * len(texts), texts, np.zeros(len(texts), int)).scores


def test_fused_layers_score_as_transformers_own_do(checkpoint, family, pairs):
    ranker = load(checkpoint(family), dtype="fp32", max_length=60, device="cpu")
    own = scores(ranker, pairs[1], fused=False)
    np.testing.assert_allclose(scores(ranker, pairs[1], fused=True), own, atol=1e-6)
    assert np.ptp(own) > 1e-3


def test_fused_layers_of_a_cascade_score_as_transformers_own_do(checkpoint, family, pairs):
    ranker = init_ranker(
        checkpoint(family, None, initializer_range=0.3), max_length=60, exit_layers=[1, 2, 3]
    )
    ranker.dtype = "fp32"
    own = ranker.predict_exits([QUESTION] * 18, pairs[1])
    ranker.use_fused_layers = True
    np.testing.assert_allclose(ranker.predict_exits([QUESTION] * 18, pairs[1]), own, atol=1e-5)


def test_fused_layers_in_bf16_are_as_close_to_fp32_as_transformers_own(checkpoint, family, pairs):
    exact = load(checkpoint(family), dtype="fp32", max_length=60, device="cpu")
    rough = load(checkpoint(family), dtype="bf16", max_length=60, device="cpu")
    expected = scores(exact, pairs[1], fused=False)
    found = scores(rough, pairs[1], fused=True)
    assert 0 < np.abs(found - expected).max() < 0.05


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
def test_fused_layers_have_the_encoder_s_activation(checkpoint, pairs, act):
    path = checkpoint("bert", hidden_act=act)
    ranker = load(path, dtype="fp32", max_length=60, device="cpu")
    own = scores(ranker, pairs[1], fused=False)
    np.testing.assert_allclose(scores(ranker, pairs[1], fused=True), own, atol=1e-6)
    ranker.dtype = "bf16"
    np.testing.assert_allclose(scores(ranker, pairs[1], fused=True), own, atol=0.05)


def test_fused_layers_filled_to_round_numbers_of_rows_score_the_same(
    checkpoint, family, pairs, monkeypatch
):
    ranker = init_ranker(
        checkpoint(family, None, initializer_range=0.3), max_length=60, exit_layers=[1, 2, 3]
    )
    ranker.dtype, ranker.use_fused_layers = "fp32", True
    plain = ranker.predict_exits([QUESTION] * 18, pairs[1])
    monkeypatch.setattr(fused_layers, "_can_reorder_weights", lambda *_: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda *_: None)
    product, rows = fused_layers.FusedLinear.__call__, set()

    def watched(self, x, *args, **kwargs):
        rows.add(len(x))
        return product(self, x, *args, **kwargs)

    monkeypatch.setattr(fused_layers.FusedLinear, "__call__", watched)
    ranker = init_ranker(
        checkpoint(family, None, initializer_range=0.3), max_length=60, exit_layers=[1, 2, 3]
    )
    ranker.dtype, ranker.use_fused_layers = "fp32", True
    filled = ranker.predict_exits([QUESTION] * 18, pairs[1])
    np.testing.assert_allclose(filled, plain, atol=1e-5)
    assert rows
    assert all(count % fused_layers.ROW_MULTIPLE == 0 for count in rows)


def test_fused_layers_follow_weights_that_change(checkpoint, pairs):
    ranker = load(checkpoint("bert"), dtype="fp32", max_length=60, device="cpu")
    before = scores(ranker, pairs[1], fused=True)
    with torch.no_grad():
        ranker.encoder.layers[1].output.dense.weight.mul_(1.5)
    after = scores(ranker, pairs[1], fused=True)
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(after, scores(ranker, pairs[1], fused=False), atol=1e-6)


def test_fused_layers_follow_one_matrix_that_is_written_in_place(checkpoint, pairs):
    ranker = load(checkpoint("bert", 2, initializer_range=0.3), dtype="fp32", device="cpu")
    before = ranker.predict_exits(*pairs)
    with torch.no_grad():  # the sums of the biases and the addresses stay
        ranker.encoder.layers[0].attention.self.query.weight.mul_(4.0)
    fused = ranker.predict_exits(*pairs)
    ranker.use_fused_layers = False
    np.testing.assert_allclose(fused, ranker.predict_exits(*pairs), atol=1e-5)
    assert np.abs(fused - before).max() > 1e-4


def test_fused_layers_follow_weights_that_are_written_past_autograd(checkpoint, pairs):
    ranker = load(checkpoint("bert"), dtype="fp32", max_length=60, device="cpu")
    before = scores(ranker, pairs[1], fused=True)
    for weight in ranker.network.parameters():
        weight.data.copy_(weight.data * 1.3)  # as averages of weights are written
    after = scores(ranker, pairs[1], fused=True)
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(after, scores(ranker, pairs[1], fused=False), atol=1e-6)


def test_training_runs_transformers_own_layers(checkpoint, family, packed):
    ranker = load(checkpoint(family), max_length=60, device="cpu")
    scores(ranker, ["Lala."], fused=True)
    ranker.train()
    loss = ranker(packed).sum()
    loss.backward()
    assert all(w.grad is not None for w in ranker.encoder.layers[0].parameters())


def test_fused_layers_stay_while_another_thread_still_ranks(checkpoint, pairs, monkeypatch):
    ranker = load(checkpoint("bert"), dtype="bf16", max_length=60, device="cpu")
    expected = scores(ranker, pairs[1], fused=True)
    embed = ranker.encoder.embed

    def meanwhile(batch):
        with ranker.scoring():
            pass  # another thread's scoring, which ends before this one's
        return embed(batch)

    monkeypatch.setattr(ranker.encoder, "embed", meanwhile)
    found = scores(ranker, pairs[1], fused=True)
    assert (found == expected).all()
    assert (found != scores(ranker, pairs[1], fused=False)).any()
