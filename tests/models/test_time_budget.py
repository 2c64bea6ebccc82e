from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.errors import ConfigError, EvaluationError
from as2ray.models.ensemble import EnsembleRanker
from as2ray.models.ranker import BEFORE_BATCH
from as2ray.models.time_budget import RankerSpeed, SliceSpeed, TimedPass

QUESTION = "What is kovarin?"
SECONDS_PER_TOKEN_AND_LAYER = 1e-4


@pytest.fixture
def candidates(pairs) -> list[str]:
    return [f"{text} {number}" for number in range(4) for text in pairs[1]]


@pytest.fixture
def cascade(checkpoint):
    ranker = init_ranker(
        checkpoint("bert", None, initializer_range=0.5), max_length=60, exit_layers=(1, 2, 3)
    )
    ranker.dtype = "fp32"
    return ranker


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the work of `timed` rankers moves; their seconds so far."""
    now = [0.0]
    for module in ("time_budget", "ranker"):
        monkeypatch.setattr(f"as2ray.models.{module}.perf_counter", lambda: now[0])
    return now


def timed(ranker, clock, monkeypatch, fixed_s: float = 0.0):
    """Lets the clock go on by a fixed time for each layer of a slice, and of each token in it."""
    run_layers, run_to_tokens = ranker.encoder.run_layers, ranker.encoder.run_to_tokens
    num_layers = len(ranker.encoder)

    def run(function, hidden, start, end):
        started_at, value = clock[0], function()  # one of the functions calls the other
        layer_s = fixed_s + SECONDS_PER_TOKEN_AND_LAYER * len(hidden)
        clock[0] = started_at + layer_s * ((num_layers if end is None else end) - start)
        return value

    def timed_layers(hidden, layout, start=0, end=None):
        return run(lambda: run_layers(hidden, layout, start, end), hidden, start, end)

    def timed_tokens(index, hidden, layout, start=0):
        return run(lambda: run_to_tokens(index, hidden, layout, start), hidden, start, None)

    monkeypatch.setattr(ranker.encoder, "run_layers", timed_layers)
    monkeypatch.setattr(ranker.encoder, "run_to_tokens", timed_tokens)
    return ranker


def test_ample_budget_ranks_as_none_does(cascade, candidates):
    cascade.drop_ratios = 0.4
    expected = cascade.rank(QUESTION, candidates)
    ranked = cascade.rank(QUESTION, candidates, budget_ms=1e6)
    assert [(r.index, r.exit_layer) for r in ranked] == [(r.index, r.exit_layer) for r in expected]
    np.testing.assert_allclose([r.score for r in ranked], [r.score for r in expected], atol=1e-5)
    assert cascade.rank(QUESTION, candidates, 3, budget_ms=1e6) == ranked[:3]


def test_ample_budget_ranks_as_none_does_without_exits(checkpoint, candidates):
    ranker = load(checkpoint("bert", 2, initializer_range=0.5), max_length=60, device="cpu")
    expected = ranker.rank(QUESTION, candidates)
    ranked = ranker.rank(QUESTION, candidates, budget_ms=1e6)
    assert [(r.index, r.exit_layer) for r in ranked] == [(r.index, None) for r in expected]


@pytest.mark.parametrize("budget_ms", [5, 20, 60, 150, 400])
@pytest.mark.parametrize("has_exits", [True, False])
def test_budget_is_kept_and_the_best_candidates_get_furthest(
    cascade, checkpoint, candidates, clock, monkeypatch, budget_ms, has_exits
):
    if not has_exits:
        cascade = load(checkpoint("bert", 2), max_length=60, device="cpu", dtype="fp32")
        cascade.use_fused_layers = False
    ranker = timed(cascade, clock, monkeypatch)
    ranker.rank(QUESTION, candidates, budget_ms=budget_ms)  # prepares the network, too
    for _ in range(2):
        started_at = clock[0]
        ranked = ranker.rank(QUESTION, candidates, budget_ms=budget_ms)
        # One candidate is always scored, and takes up to 12 ms here.
        assert 1e3 * (clock[0] - started_at) <= max(budget_ms * 1.05, 12)
    assert sorted(r.index for r in ranked) == list(range(len(candidates)))
    depths = [r.exit_layer if r.exit_layer is not None else 3 for r in ranked]
    assert depths == sorted(depths, reverse=True)
    unscored = [r.index for r in ranked if r.exit_layer == 0]
    assert unscored == sorted(unscored)
    assert {r.score for r in ranked if r.exit_layer == 0} <= {0.0}
    if budget_ms >= 20:
        assert depths[0] == 3
    if unscored:  # the first ones that were given are scored
        assert min(unscored) > max(r.index for r in ranked if r.exit_layer != 0)


@pytest.mark.parametrize("budget_ms", [1.1, 400])
def test_ranking_tells_by_how_much_its_budget_was_exceeded(
    cascade, candidates, clock, monkeypatch, budget_ms
):
    ranker = timed(cascade, clock, monkeypatch)
    assert ranker.rank(QUESTION, candidates).budget_exceeded_ms is None
    ranker.rank(QUESTION, candidates, budget_ms=budget_ms)
    started_at = clock[0]
    ranking = ranker.rank(QUESTION, candidates, 2, budget_ms=budget_ms)
    assert len(ranking) == 2
    exceeded_ms = 1e3 * (clock[0] - started_at) - budget_ms
    assert ranking.budget_exceeded_ms == pytest.approx(max(0.0, exceeded_ms))
    assert (ranking.budget_exceeded_ms > 0) == (budget_ms == 1.1)


def test_first_ranking_prepares_the_network_before_its_time_starts(
    cascade, candidates, clock, monkeypatch
):
    timed(cascade, clock, monkeypatch)
    scoring, durations = cascade.scoring, iter([10.0])

    @contextmanager
    def prepare():
        clock[0] += next(durations, 0.0)
        with scoring():
            yield

    monkeypatch.setattr(cascade, "scoring", prepare)
    ranked = cascade.rank(QUESTION, candidates, budget_ms=150)
    assert sum(r.exit_layer > 0 for r in ranked) > 10


def test_more_time_lets_more_candidates_through_each_exit(cascade, candidates, clock, monkeypatch):
    ranker = timed(cascade, clock, monkeypatch)
    ranker.rank(QUESTION, candidates, budget_ms=100)
    reached = []
    for budget_ms in (20, 60, 150, 400):
        layers = [r.exit_layer for r in ranker.rank(QUESTION, candidates, budget_ms=budget_ms)]
        reached.append([sum(layer >= exit for layer in layers) for exit in (1, 2, 3)])
    for fewer, more in pairwise(reached):
        assert all(a <= b for a, b in zip(fewer, more))
    assert all(first >= second >= third for first, second, third in reached)


def test_plan_expects_an_exit_to_pass_as_many_as_before(cascade, candidates):
    for drop_ratio, passes in ((0.0, 1.0), (0.5, 0.5)):
        for _ in range(20):
            cascade.rank(QUESTION, candidates, drop_ratios=drop_ratio, budget_ms=1e6)
        assert cascade.speed.keep_ratios == pytest.approx([passes] * 2, abs=0.02)


def test_fewer_candidates_are_scored_where_more_are_expected_to_pass(
    cascade, candidates, clock, monkeypatch
):
    ranker = timed(cascade, clock, monkeypatch)
    ranker.rank(QUESTION, candidates, budget_ms=100)  # measures the speed
    num_scored = []
    for keep_ratio in (0.3, 0.6, 1.0):
        ranker.speed.keep_ratios[:] = keep_ratio
        timed_pass = TimedPass(ranker, QUESTION, candidates, None, clock[0] + 0.04)
        num_scored.append(int((timed_pass.run().stage_index >= 0).sum()))
    few, some, many = sorted(num_scored)
    assert num_scored == [many, some, few]
    assert few < some < many


def test_pass_that_shares_its_time_leaves_it_to_others(cascade, candidates, clock, monkeypatch):
    ranker = timed(cascade, clock, monkeypatch)
    ranker.rank(QUESTION, candidates, budget_ms=100)  # measures the speed
    started_at, shares = clock[0], iter([1.0, 1.0, 0.25])

    def limit_time(left_s):
        return left_s * next(shares, 1.0)

    timed_pass = TimedPass(ranker, QUESTION, candidates, None, started_at + 0.2, limit_time)
    staged = timed_pass.run()
    # It keeps to a quarter of what was left, although the others did not wait for long.
    assert clock[0] - started_at < 0.08
    assert timed_pass.ends_at < timed_pass.deadline
    assert staged.stage_index.max() == 2
    assert timed_pass.num_tokens == timed_pass.lengths[staged.stage_index >= 0].sum()


def test_each_number_of_threads_has_its_speed(cascade, candidates, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    cascade.rank(QUESTION, candidates, budget_ms=100)
    with_one = cascade.speed
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert str(cascade.speed) == str(with_one)  # until it is measured
    assert cascade.speed is not with_one
    before = deepcopy(with_one)
    cascade.rank(QUESTION, candidates, budget_ms=100)
    assert str(cascade.speed) != str(before)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert cascade.speed is with_one
    assert str(with_one) == str(before)


def test_what_goes_before_a_slice_is_no_part_of_the_measured_speed(
    cascade, candidates, clock, monkeypatch
):
    ranker = timed(cascade, clock, monkeypatch)

    def wait() -> None:
        clock[0] += 0.5

    token = BEFORE_BATCH.set(wait)
    try:
        ranker.rank(QUESTION, candidates, budget_ms=3_000)
    finally:
        BEFORE_BATCH.reset(token)
    assert ranker.speed.start.fixed_s == pytest.approx(0.0)
    assert ranker.speed.start.s_per_token == pytest.approx(SECONDS_PER_TOKEN_AND_LAYER)


def test_short_budget_is_not_spent_on_what_each_slice_takes(
    checkpoint, candidates, clock, monkeypatch
):
    ranker = load(checkpoint("bert", 2), max_length=60, device="cpu", dtype="fp32")
    ranker.use_fused_layers = False
    timed(ranker, clock, monkeypatch, fixed_s=2e-3)  # 6 ms a slice, as much as 20 tokens
    ranker.rank(QUESTION, candidates, budget_ms=100)
    assert ranker.speed.start.fixed_s == pytest.approx(6e-3, rel=0.2)
    started_at = clock[0]
    timed_pass = TimedPass(ranker, QUESTION, candidates, None, started_at + 0.1)
    timed_pass.run()
    duration_s = clock[0] - started_at
    assert duration_s <= 0.105
    tokens_s = timed_pass.num_tokens * 3 * SECONDS_PER_TOKEN_AND_LAYER
    assert tokens_s > 0.6 * duration_s


def test_ranker_that_becomes_faster_is_noticed(cascade, candidates, clock, monkeypatch):
    ranker = timed(cascade, clock, monkeypatch)
    ranker.speed = RankerSpeed(SliceSpeed(5.0, 10.0), SliceSpeed(5.0, 10.0), np.ones(2))
    for _ in range(60):
        ranked = ranker.rank(QUESTION, candidates, budget_ms=100)
    assert sum(r.exit_layer > 0 for r in ranked) > 10


@pytest.mark.filterwarnings("error")
def test_budget_may_be_a_number_of_numpy(cascade, candidates):
    for budget_ms in (np.float32(5_000), np.float16(5_000), np.int64(5_000)):
        ranked = cascade.rank(QUESTION, candidates, budget_ms=budget_ms)
        assert sorted(r.index for r in ranked) == list(range(len(candidates)))
    with pytest.raises(ConfigError, match="must be a number above 0"):
        cascade.rank(QUESTION, candidates, budget_ms=np.float32("inf"))


def test_impossible_budgets_and_rankers_are_refused(cascade, checkpoint, candidates):
    for budget_ms in (0, -1, float("nan"), float("inf"), 10**400, "50", True):
        with pytest.raises(ConfigError, match="must be a number above 0"):
            cascade.rank(QUESTION, candidates, budget_ms=budget_ms)
    with pytest.raises(EvaluationError, match="not one text"):
        cascade.rank(QUESTION, "a text", budget_ms=10)
    ensemble = EnsembleRanker([load(checkpoint("bert"), max_length=60, device="cpu")])
    with pytest.raises(ConfigError, match="cannot keep a time budget"):
        ensemble.rank(QUESTION, candidates, budget_ms=10)
    assert cascade.rank(QUESTION, [], budget_ms=10) == []
