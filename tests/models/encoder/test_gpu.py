"""What runs on a GPU only: kernels, graphs of small batches, attention with dropout.

Without a GPU these tests are skipped; `python -m pytest tests/models/encoder/test_gpu.py` runs them
on a machine that has one, without Ray.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.models.encoder.gpu_graphs import MAX_TOKENS, TOKENS_PER_SEQUENCE
from as2ray.models.encoder.length_buckets import bucketed_attention
from as2ray.models.encoder.packed_attention import (
    SequenceLayout,
    packed_attention,
    take_ranges,
)
from as2ray.models.encoder.pooling import mean_pool
from as2ray.text.packing import TokenSequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _with_gpu():
    """Undoes `_on_cpu`, which hides GPUs from all other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        yield


def make_qkv(lengths, num_heads, head_size, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shape = (sum(lengths), 3, num_heads, head_size)
    return torch.randn(shape, device=DEVICE).to(dtype), SequenceLayout.from_lengths(lengths, DEVICE)


def reference(qkv, layout):
    q, k, v = qkv.float().unbind(1)
    return bucketed_attention(q, k, v, layout.length_buckets, None, 0.0)


def relative_error(actual, expected):
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "head_size"), [(12, 32), (16, 64), (2, 16), (1, 128)])
@pytest.mark.parametrize(
    "lengths",
    [[128, 100, 65, 64, 40, 40, 33, 32, 17, 16, 3, 1], [1], [3, 90, 20, 128, 2, 70, 9], [40] * 300],
)
def test_attention_of_short_sequences_equals_torch_s_in_fp32(lengths, num_heads, head_size, dtype):
    from as2ray.models.encoder.gpu_kernels import short_attention

    qkv, layout = make_qkv(lengths, num_heads, head_size, dtype)
    attended = short_attention(qkv, layout.cu_seqlens, layout.length_buckets)
    assert relative_error(attended, reference(qkv, layout).flatten(1)) < 5e-3


@pytest.mark.parametrize("hidden_size", [16, 384, 768, 1_024, 1_000, 4_096])
def test_addition_with_norm_equals_torch_s_in_fp32(hidden_size):
    from as2ray.models.encoder.gpu_kernels import add_and_norm

    torch.manual_seed(0)
    x, residual = torch.randn(2, 301, hidden_size, device=DEVICE).bfloat16()
    weights, bias = torch.randn(2, hidden_size, device=DEVICE).bfloat16()
    expected = functional.layer_norm(
        x.float() + residual.float(), (hidden_size,), weights.float(), bias.float(), 1e-12
    )
    assert relative_error(add_and_norm(x, residual, weights, bias, 1e-12), expected) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [16, 384, 1_000])
def test_mean_of_states_equals_that_of_a_cpu(hidden_size, dtype):
    lengths = [100, 33, 17, 16, 2, 1]
    hidden = torch.randn(sum(lengths), hidden_size, device=DEVICE).to(dtype)
    layout = SequenceLayout.from_lengths(lengths, DEVICE)
    on_cpu = SequenceLayout.from_lengths(lengths, torch.device("cpu"))
    for skip_first in (False, True):
        expected = mean_pool(hidden.cpu(), on_cpu, skip_first)
        with torch.no_grad():
            actual = mean_pool(hidden, layout, skip_first)
        torch.testing.assert_close(actual.cpu(), expected, atol=1e-5, rtol=1e-4)


def test_ranges_of_rows_are_those_of_a_cpu():
    hidden = torch.arange(40.0, device=DEVICE)[:, None]
    rows = take_ranges(hidden, np.array([30, 0, 7]), np.array([5, 1, 3]))
    assert rows[:, 0].tolist() == [30, 31, 32, 33, 34, 0, 7, 8, 9]


def test_attention_with_dropout_is_that_without_in_the_mean_forward_and_backward():
    lengths = list(np.sort(np.random.default_rng(0).integers(5, 100, 40))[::-1])
    qkv, layout = make_qkv(lengths, 4, 32)
    inputs = [x.transpose(0, 1)[None].detach().requires_grad_() for x in qkv.unbind(1)]
    gradient = torch.randn(1, sum(lengths), 4, 32, device=DEVICE).bfloat16()
    module = torch.nn.Identity()

    def run(dropout):
        attended, _ = packed_attention(module, *inputs, None, layout=layout, dropout=dropout)
        grads = torch.autograd.grad(attended, inputs, gradient)
        return [x.detach().float() for x in (attended, *grads)]

    expected, samples = run(0.0), [run(0.1) for _ in range(200)]
    for exact, *others in zip(expected, *samples):
        assert relative_error(others[0], exact) > 0.1
        assert relative_error(torch.stack(others).mean(0), exact) < 0.05


def test_dropout_of_a_seed_is_repeated():
    qkv, layout = make_qkv([50, 40], 2, 32)
    inputs = [x.transpose(0, 1)[None] for x in qkv.unbind(1)]
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(
            packed_attention(torch.nn.Identity(), *inputs, None, layout=layout, dropout=0.1)[0]
        )
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def make_sequences(lengths):
    ids = np.random.default_rng(0).integers(5, 40, sum(lengths)).astype(np.int32)
    return TokenSequences(ids, np.zeros_like(ids), np.asarray(lengths, np.int32))


@pytest.fixture(params=["bert", "roberta", "albert", "electra", "distilbert"])
def ranker(request, checkpoint):
    return load(checkpoint(request.param, hidden_size=64), device="cuda")


def scores_without_graphs(ranker, sequences):
    question_index = np.zeros(len(sequences), int)
    with ranker.scoring():
        ranker.encoder._fused.graphs = None
    scores = ranker.predict_sequences(sequences, question_index).scores
    ranker.encoder._fused = None
    return scores


def test_graphs_of_small_batches_score_as_single_operations_do(ranker):
    rng = np.random.default_rng(0)
    for num_sequences in (1, 2, 30, 31, 200, 30):
        sequences = make_sequences(rng.integers(5, 30, num_sequences))
        scores = ranker.predict_sequences(sequences, np.zeros(num_sequences, int)).scores
        assert ranker.encoder._fused.graphs._graphs
        expected = scores_without_graphs(ranker, sequences)
        np.testing.assert_allclose(scores, expected, atol=2e-3)


def test_gpu_scores_equal_those_of_a_cpu(ranker):
    sequences = make_sequences(np.random.default_rng(1).integers(5, 30, 60))
    question_index = np.zeros(60, int)
    scores = {}
    for dtype in ("bf16", "fp32"):
        ranker.dtype = dtype
        scores[dtype] = ranker.predict_sequences(sequences, question_index).scores
    expected = ranker.cpu().predict_sequences(sequences, question_index).scores
    np.testing.assert_allclose(scores["fp32"], expected, atol=1e-5)
    np.testing.assert_allclose(scores["bf16"], expected, atol=0.03)


def test_changed_weights_change_what_a_graph_computes(checkpoint):
    ranker = load(checkpoint("bert", hidden_size=64), device="cuda")
    sequences = make_sequences([20] * 10)
    before = ranker.predict_sequences(sequences, np.zeros(10, int)).scores
    with torch.no_grad():
        for weights in ranker.network.bert.encoder.layer[0].parameters():
            weights.mul_(1.5)
    after = ranker.predict_sequences(sequences, np.zeros(10, int)).scores
    assert not np.allclose(before, after, atol=1e-4)
    np.testing.assert_allclose(after, scores_without_graphs(ranker, sequences), atol=2e-3)


def test_batches_too_large_or_of_too_short_sequences_for_a_graph_are_scored_too(checkpoint):
    ranker = load(checkpoint("bert", hidden_size=64), device="cuda")
    ranker.max_batch_tokens = 2 * MAX_TOKENS
    for lengths in ([20] * (MAX_TOKENS // 20 + 10), [TOKENS_PER_SEQUENCE - 3] * 200):
        sequences = make_sequences(lengths)
        scores = ranker.predict_sequences(sequences, np.zeros(len(lengths), int)).scores
        assert np.isfinite(scores).all()
        assert not ranker.encoder._fused.graphs._graphs


def test_several_threads_share_the_graphs_of_a_ranker(checkpoint):
    ranker = load(checkpoint("bert", hidden_size=64), device="cuda")
    rng = np.random.default_rng(2)
    requests = [make_sequences(rng.integers(5, 30, n)) for n in rng.integers(1, 60, 64)]

    def score(sequences):
        return ranker.predict_sequences(sequences, np.zeros(len(sequences), int)).scores

    expected = [score(sequences) for sequences in requests]
    with ThreadPoolExecutor(8) as pool:
        for scores, alone in zip(pool.map(score, requests), expected):
            np.testing.assert_array_equal(scores, alone)


def test_threads_record_and_replay_graphs_of_several_rankers(checkpoint):
    path = checkpoint("bert", hidden_size=64)
    rankers = [load(path, device="cuda") for _ in range(4)]
    rng = np.random.default_rng(4)
    requests = [make_sequences(rng.integers(5, 30, n)) for n in rng.integers(1, 60, 64)]

    def score(number):
        sequences = requests[number]
        return rankers[number % 4].predict_sequences(sequences, np.zeros(len(sequences), int))

    with ThreadPoolExecutor(8) as pool:
        all_scores = list(pool.map(score, range(64)))
    for number, staged in enumerate(all_scores):
        np.testing.assert_array_equal(staged.scores, score(number).scores)


def test_cascade_drops_the_same_candidates_with_graphs(checkpoint):
    path = checkpoint("bert", None, hidden_size=64)
    ranker = init_ranker(path, max_length=60, exit_layers=(1, 2, 3)).to(DEVICE).eval()
    with torch.no_grad():
        for weights in ranker.parameters():
            weights.add_(torch.randn_like(weights) * 0.2)
    ranker.use_fused_layers = True
    sequences = make_sequences(np.random.default_rng(3).integers(5, 30, 80))
    question_index = np.repeat([0, 1], 40)
    staged = ranker.predict_sequences(sequences, question_index, 0.5)
    assert ranker.encoder._fused.graphs._graphs
    with ranker.scoring():
        ranker.encoder._fused.graphs = None
    expected = ranker.predict_sequences(sequences, question_index, 0.5)
    np.testing.assert_allclose(staged.scores, expected.scores, atol=5e-3)
    np.testing.assert_array_equal(staged.stage_index, expected.stage_index)
