import pytest
import torch

from as2ray.models.encoder.length_buckets import (
    MAX_MANUAL_LENGTH,
    UNMASKED,
    AttentionMask,
    bucketed_attention,
    bucketed_self_attention,
)
from as2ray.models.encoder.packed_attention import SequenceLayout

RUNS = ((2, 5), (1, 3), (4, 1))
TOKENS = 17


def packed(seed: int, dtype=torch.float64) -> list[torch.Tensor]:
    """Query, key and value, shape [17, 2, 4]."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(TOKENS, 2, 4, generator=generator, dtype=dtype) for _ in range(3))
    return [x.requires_grad_() for x in made]


def one_by_one(q, k, v, scale=None) -> torch.Tensor:
    """Attention of each sequence alone."""
    lengths = [length for n, length in RUNS for _ in range(n)]
    out = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v))):
        a, b, c = (x.transpose(0, 1) for x in parts)
        scores = (a @ b.mT) * (a.shape[-1] ** -0.5 if scale is None else scale)
        out.append((scores.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attend_by_runs_equals_attention_of_each_sequence_alone(scale):
    q, k, v = packed(0)
    torch.testing.assert_close(
        bucketed_attention(q, k, v, RUNS, scale, 0.0), one_by_one(q, k, v, scale)
    )


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attend_by_runs_almost_no_dropout_has_attention_s_values_and_gradients(scale):
    q, k, v = packed(1)
    weights = torch.randn(TOKENS, 2, 4, dtype=torch.float64)
    # Less than the random numbers' resolution: the code of dropout runs, and nothing is dropped.
    got = bucketed_attention(q, k, v, RUNS, scale, 1e-9)
    want = one_by_one(q, k, v, scale)
    torch.testing.assert_close(got, want)
    mine = torch.autograd.grad((got * weights).sum(), (q, k, v))
    torch.testing.assert_close(mine, torch.autograd.grad((want * weights).sum(), (q, k, v)))


def test_attend_by_runs_with_dropout_has_the_gradients_of_its_values():
    def attend(*inputs):
        torch.manual_seed(2)  # the same weights are dropped each time
        return bucketed_attention(*inputs, RUNS, None, 0.4)

    assert torch.autograd.gradcheck(attend, packed(2))


def test_attend_by_runs_with_dropout_keeps_the_mean():
    q, k, v = (x.detach() for x in packed(3))
    torch.manual_seed(0)
    drawn = [bucketed_attention(q, k, v, RUNS, None, 0.3) for _ in range(4000)]
    mean, whole = torch.stack(drawn).mean(0), one_by_one(q, k, v)
    torch.testing.assert_close(mean, whole, atol=0.08, rtol=0)
    assert not torch.allclose(drawn[0], whole, atol=0.08)


def test_attend_by_runs_with_dropout_follows_from_the_seed():
    q, k, v = packed(4)
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(bucketed_attention(q, k, v, RUNS, None, 0.3))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_attend_by_runs_with_dropout_drops_the_share_asked_for():
    # Values of 1: each output is the mean kept weight over 1 - dropout.
    q = torch.zeros(4096, 1, 4)
    out = bucketed_attention(q, q, torch.ones_like(q), ((4096, 1),), None, 0.25)
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.03
    torch.testing.assert_close(out.unique(), torch.tensor([0, 4 / 3]))


@pytest.mark.parametrize("inside", [True, False])
def test_attend_by_runs_bf16_with_dropout_is_close_to_fp32_wherever_backward_runs(inside):
    # On a GPU the backward pass runs in a thread that may know another autocast, or none.
    q, k, v = packed(6, torch.float32)
    exact = torch.autograd.grad(one_by_one(q, k, v).square().sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        out = bucketed_attention(*(x.bfloat16() for x in (q, k, v)), RUNS, None, 1e-9)
    assert out.dtype == torch.bfloat16
    loss = out.float().square().sum()
    with torch.autocast("cpu", torch.float16 if inside else torch.bfloat16, enabled=inside):
        rough = torch.autograd.grad(loss, (q, k, v))
    for one, other in zip(rough, exact):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attend_by_runs_bf16_on_a_cpu_is_fp32_s_attention_rounded(scale):
    q, k, v = (x.detach().bfloat16() for x in packed(7, torch.float32))
    exact = one_by_one(q.float(), k.float(), v.float(), scale)
    torch.testing.assert_close(
        bucketed_attention(q, k, v, RUNS, scale, 0.0), exact.bfloat16(), atol=1e-6, rtol=2**-7
    )
    assert torch.equal(q, packed(7, torch.float32)[0].bfloat16())


def test_layout_of_lengths_groups_neighbours_of_equal_length():
    layout = SequenceLayout.from_lengths([5, 5, 3, 1, 1, 1], torch.device("cpu"))
    assert layout.length_buckets == ((2, 5), (1, 3), (3, 1))
    assert layout.cu_seqlens.tolist() == [0, 5, 10, 13, 14, 15, 16]
    assert layout.first_tokens.tolist() == [0, 5, 10, 13, 14, 15]
    assert layout.max_seqlen == 5
    assert layout.num_tokens == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first_queries", [False, True])
@pytest.mark.parametrize(
    ("mask", "scale"), [(UNMASKED, None), (AttentionMask(sliding_window=3), 0.3)]
)
def test_self_attention_of_buckets_equals_attention_of_each_sequence_alone(
    dtype, first_queries, mask, scale
):
    lengths = [MAX_MANUAL_LENGTH + 1, 5, 5, 3]
    layout = SequenceLayout.from_lengths(lengths, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 2, 8, generator=generator).to(dtype)
    buckets = layout.length_buckets
    expected = bucketed_attention(*qkv.float().unbind(1), buckets, scale, 0.0, mask).flatten(1)
    expected = expected[layout.first_tokens] if first_queries else expected
    num_rows = len(expected) + 3
    arguments = (num_rows, torch.float32, first_queries, mask, scale)
    result = bucketed_self_attention(qkv, buckets, *arguments)
    assert result[-3:].count_nonzero() == 0
    num_long = 1 if first_queries else lengths[0]
    torch.testing.assert_close(result[num_long:-3], expected[num_long:], atol=1e-6, rtol=1e-5)
    long_tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # torch's kernel, in bf16
    torch.testing.assert_close(
        result[:num_long], expected[:num_long], atol=long_tolerance, rtol=1e-5
    )


def test_layout_knows_its_first_tokens_with_zeros_after_them():
    layout = SequenceLayout.from_lengths([3, 3, 2], torch.device("cpu"))
    assert layout.are_first_tokens(torch.tensor([0, 3, 6]))
    assert layout.are_first_tokens(torch.tensor([0, 3, 6, 0, 0]))
    for others in ([0, 3], [0, 3, 7], [0, 3, 6, 4]):
        assert not layout.are_first_tokens(torch.tensor(others))
