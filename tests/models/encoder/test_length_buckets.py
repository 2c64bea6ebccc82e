import pytest
import torch

from as2ray.models.encoder.length_buckets import bucketed_attention
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
