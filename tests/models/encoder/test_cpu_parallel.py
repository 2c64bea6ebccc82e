import subprocess
import sys
import threading
from itertools import count, islice

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from as2ray.checkpoints.initialization import build_sequential, init_ranker
from as2ray.models import precision
from as2ray.models.encoder import cpu_parallel
from as2ray.models.encoder.cpu_parallel import balanced_budget, parallel_map
from as2ray.profiling.savings import measure_savings
from as2ray.text.packing import split_by_tokens

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(np.array)


@pytest.fixture
def three(monkeypatch):
    """Three threads, even for the few tokens that a test scores."""
    monkeypatch.setattr(cpu_parallel, "MIN_PARALLEL_TOKENS", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=["pointwise", "cascade", "sequential", "joint"])
def ranker(request, checkpoint):
    path = checkpoint("bert", None if request.param in ("cascade", "joint") else 2)
    make = {
        "pointwise": lambda: init_ranker(path, max_length=60),
        "cascade": lambda: init_ranker(path, max_length=60, exit_layers=(1, 2, 3)),
        "sequential": lambda: build_sequential(
            [init_ranker(path, max_length=60, num_layers=n) for n in (1, 2)]
        ),
        "joint": lambda: init_ranker(path, max_length=60, is_joint=True),
    }[request.param]
    ranker = make()
    with torch.no_grad():
        for weights in ranker.parameters():
            weights.add_(torch.randn_like(weights) * 0.1)
    ranker.dtype = "fp32"
    return ranker


def ranked(ranker, pairs):
    drop = 0.4 if ranker.exit_layers else None
    found = ranker.rank_many([(pairs[0][0], pairs[1]), (pairs[0][1], pairs[1][:5])], drop)
    return [sorted((one.index, one.score, one.exit_layer) for one in own) for own in found]


def test_side_by_side_gives_what_one_after_the_other_gives(ranker, pairs, three):
    several = ranked(ranker, pairs)
    ranker.allow_parallel = False
    for own, expected in zip(several, ranked(ranker, pairs), strict=True):
        np.testing.assert_array_equal([o[::2] for o in own], [e[::2] for e in expected])
        np.testing.assert_allclose([o[1] for o in own], [e[1] for e in expected], atol=1e-6)


def test_packed_batches_are_scored_in_several_threads_each_of_one_core(
    checkpoint, pairs, three, monkeypatch
):
    ranker = init_ranker(checkpoint("bert"), max_length=60)
    seen = set()
    forward = ranker.forward

    def watched(batch):
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        assert torch.is_inference_mode_enabled()
        return forward(batch)

    monkeypatch.setattr(ranker, "forward", watched)
    for _ in range(20):
        ranker.rank(pairs[0][0], pairs[1])
    assert len(seen) > 1
    assert {threads for _, threads in seen} == {1}
    assert threading.current_thread().name not in {name for name, _ in seen}


def test_what_dropping_saves_is_measured_with_all_threads_on_both_sides(
    checkpoint, three, monkeypatch
):
    ranker = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=(1, 2, 3))
    score, packed = ranker.predict_scores, []

    def watched(batches, num_rows):
        packed.append(list(batches))
        return score(packed[-1], num_rows)

    monkeypatch.setattr(ranker, "predict_scores", watched)
    measure_savings(ranker, tiny.candidates(8), 0.5, num_repeats=1)
    assert [len(batches) for batches in packed] == [3]


def test_other_threads_keep_their_cores(three):
    assert list(parallel_map(lambda x: -x, range(9), 3)) == [-x for x in range(9)]
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *later] == [3, 3]


def test_a_single_part_is_worked_on_by_all_cores_and_here(three):
    where = lambda _: (threading.current_thread(), torch.get_num_threads())  # noqa: E731
    assert list(parallel_map(where, [0], 3)) == [(threading.current_thread(), 3)]


def test_inner_parts_are_worked_on_in_the_thread_of_their_part(three):
    def outer(_):
        inner = list(parallel_map(lambda _: threading.current_thread(), range(4), 3))
        return {threading.current_thread()} == set(inner)

    assert list(parallel_map(outer, range(6), 3)) == [True] * 6


def test_speeds_of_number_formats_are_measured_with_one_core(three, monkeypatch):
    # With several, products wait for cores that other processes have, and formats seem slow.
    multiply, used = torch.mm, []

    def watched(*matrices):
        used.append((matrices[0].dtype, torch.get_num_threads()))
        return multiply(*matrices)

    monkeypatch.setattr(torch, "mm", watched)
    precision._is_bf16_faster.__wrapped__()
    assert set(used) == {(torch.bfloat16, 1), (torch.float32, 1)}
    assert torch.get_num_threads() == 3


def test_parts_are_taken_as_they_are_needed(three):
    taken = count()
    parts = (next(taken) for _ in range(1_000))
    assert list(islice(parallel_map(lambda x: x, parts, 3), 5)) == [0, 1, 2, 3, 4]
    assert next(taken) < 15


def test_the_error_of_a_part_is_told_when_no_other_is_at_work(three):
    at_work, release = threading.Semaphore(0), threading.Event()
    ended = []

    def work(part):
        if part == 0:
            at_work.acquire()
            release.set()
            raise ValueError("the first")
        at_work.release()
        release.wait()
        ended.append(part)

    with pytest.raises(ValueError, match="the first"):
        list(parallel_map(work, range(3), 3))
    assert sorted(ended) == [1, 2]


FORKS = """
import os
import signal

from as2ray.models.encoder.cpu_parallel import parallel_map

list(parallel_map(abs, range(4), 3))
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(list(parallel_map(abs, range(-4, 0), 3)) != [4, 3, 2, 1])
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own():
    """The parent is a process of its own, for a child of one with Ray's threads may crash."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=120)


@given(LENGTHS, st.integers(60, 400), st.integers(1, 5))
def test_balanced_budget_divides_tokens_evenly(lengths, budget, count):
    whole = balanced_budget(lengths, budget, count)
    groups = [int(lengths[own].sum()) for own in split_by_tokens(lengths, whole)]
    assert max(groups) <= whole <= budget
    if whole < budget and lengths.sum() > cpu_parallel.MIN_PARALLEL_TOKENS * count:
        assert len(groups) <= count * -(-int(lengths.sum()) // (count * budget))
