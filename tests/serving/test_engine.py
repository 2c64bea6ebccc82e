"""Desks and the line before them, without HTTP."""

import asyncio
import pickle
import threading

import numpy as np
import pytest
from served import CANDIDATES, QUESTION

from as2ray.checkpoints.loading import load
from as2ray.models.ensemble import EnsembleRanker
from as2ray.serving.batch_queue import BatchQueue
from as2ray.serving.engine import RerankEngine, rank_batch
from as2ray.serving.settings import BatchingConfig, Limits
from as2ray.serving.types import RequestError, RerankRequest, RerankResult

OTHERS = [f"{one} lala" for one in CANDIDATES[:4]]


@pytest.fixture(scope="module")
def desk(cascade) -> RerankEngine:
    return RerankEngine(load(cascade, device="cpu", dtype="fp32"), Limits())


def test_questions_ranked_together_are_ranked_as_each_alone(desk):
    asked = [
        RerankRequest(QUESTION, CANDIDATES),
        RerankRequest("What is muri?", OTHERS, drop_ratios=0.0),
        RerankRequest("What is lala?", CANDIDATES, drop_ratios=[0.0, 0.5]),
    ]
    answers = desk.rank([desk.read(one) for one in asked])
    for one, answer in zip(asked, answers):
        alone = desk.ranker.rank(one.question, one.candidates, drop=one.drop_ratios)
        assert [(r.index, r.exit_layer) for r in answer.ranking] == [
            (r.index, r.exit_layer) for r in alone
        ]
        assert [r.score for r in answer.ranking] == pytest.approx([r.score for r in alone])
    assert [answer.survivors for answer in answers] == [(6, 3, 1), (4, 4, 4), (6, 6, 3)]


def test_survivors_are_those_that_the_exits_scored(desk):
    [answer] = desk.rank([desk.read(RerankRequest(QUESTION, CANDIDATES))])
    layers = np.array([one.exit_layer for one in answer.ranking])
    assert answer.survivors == tuple(int(np.sum(layers >= layer)) for layer in answer.exits)


def test_relief_raises_drop_ratios_but_those_that_were_asked(desk):
    asked = [
        RerankRequest(QUESTION, CANDIDATES),
        RerankRequest(QUESTION, CANDIDATES, drop_ratios=0.0),
    ]
    own, pinned = desk.rank([desk.read(one) for one in asked], relief=0.8)
    assert (own.drop, own.relieved) == ((0.8, 0.8), True)
    assert (pinned.drop, pinned.relieved) == ((0.0, 0.0), False)


def test_rankers_of_one_stage_and_ensembles_rank_too(checkpoint):
    pointwise = load(checkpoint("bert"), device="cpu", dtype="fp32")
    for ranker in (pointwise, EnsembleRanker([pointwise, pointwise]).eval()):
        desk = RerankEngine(ranker, Limits())
        [answer] = rank_batch([desk.tokenize(RerankRequest(QUESTION, CANDIDATES))])
        alone = ranker.rank(QUESTION, CANDIDATES)
        assert [one.index for one in answer.ranking] == [one.index for one in alone]
        assert (answer.exit_layers, answer.num_scored, answer.drop_ratios) == ((), (), ())
        with pytest.raises(RequestError, match="one stage"):
            desk.tokenize(RerankRequest(QUESTION, CANDIDATES, drop_ratios=0.5))


def test_a_batch_of_two_desks_comes_back_in_order(desk, checkpoint):
    other = RerankEngine(load(checkpoint("bert"), device="cpu"), Limits())
    asked = RerankRequest(QUESTION, CANDIDATES)
    answers = rank_batch([d.tokenize(asked) for d in (desk, other, desk)])
    assert [bool(answer.exit_layers) for answer in answers] == [True, False, True]


def test_too_many_tokens_are_refused(cascade):
    desk = RerankEngine(load(cascade, device="cpu"), Limits(max_request_tokens=512))
    with pytest.raises(RequestError, match="at most 512") as refused:
        desk.tokenize(RerankRequest(QUESTION, CANDIDATES * 20))
    assert refused.value.code == "too_large"


def test_a_refusal_survives_the_way_between_processes():
    refused = RequestError(
        "overloaded",
        "a; expected b",
        retry_after=7,
    )
    again = pickle.loads(pickle.dumps(refused))
    assert (again.kind, again.told, again.retry_after) == ("overloaded", refused.message, 7)


def test_relief_grows_with_the_waiting_room():
    batches = BatchingConfig(max_drop_ratio=0.8, start_at_fill=0.5)
    assert [batches.drop_ratio_at(f) for f in (0.0, 0.5, 0.75, 1.0)] == [0.0, 0.0, 0.4, 0.8]
    assert BatchingConfig().drop_ratio_at(1.0) == 0.0


class Gated:
    """Ranks nothing until it may; keeps what it was given."""

    def __init__(self) -> None:
        self.may, self.batches = threading.Event(), []

    def __call__(self, batch, fullness, at_work) -> list[RerankResult]:
        assert self.may.wait(30)
        self.batches.append(([read.asked.question for read in batch], fullness))
        return [RerankResult(read.asked.question, [], read.tokens) for read in batch]


@pytest.fixture
def gated() -> Gated:
    return Gated()


async def asking(line, desk, names, within=30.0) -> list[asyncio.Task]:
    """Tasks that wait in the line, in order; the first is on its way to be ranked."""
    tasks = []
    for name in names:
        read = desk.read(RerankRequest(name, CANDIDATES))
        tasks.append(asyncio.create_task(line.answer(read, within)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


def test_batches_form_while_the_ranker_works_in_order_and_within_the_budget(desk, gated):
    tokens = desk.read(RerankRequest("muri a", CANDIDATES)).tokens

    async def run() -> list[RerankResult]:
        line = BatchQueue(gated, 2 * tokens, 100 * tokens)
        tasks = await asking(line, desk, [f"muri {x}" for x in "abcdef"])
        gated.may.set()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert [answer.model for answer in answers] == [f"muri {x}" for x in "abcdef"]
    names = [[name[-1] for name in batch] for batch, _ in gated.batches]
    assert names == [["a"], ["b", "c"], ["d", "e"], ["f"]]
    assert gated.batches[1][1] > gated.batches[2][1] > 0


def test_two_batches_are_ranked_side_by_side_where_enough_wait(desk):
    met, seen = threading.Barrier(2), []

    def rank(batch, _, at_work) -> list[RerankResult]:
        met.wait(30)  # alone it would wait for ever
        seen.append(at_work)
        return desk.rank(batch)

    async def run() -> list[RerankResult]:
        line = BatchQueue(rank, 1, 100_000, num_workers=2)
        tasks = await asking(line, desk, [f"muri {x}" for x in "abcdef"])
        answers = await asyncio.gather(*tasks)
        assert line.queued_tokens == 0
        return answers

    assert len(asyncio.run(run())) == 6
    assert sorted(seen[:2]) == [1, 2]
    assert set(seen[2:]) <= {1, 2}


def test_questions_that_come_at_once_are_one_batch_with_all_cores(desk, gated):
    gated.may.set()
    at_work = []

    def rank(batch, fullness, busy) -> list[RerankResult]:
        at_work.append(busy)
        return gated(batch, fullness, busy)

    async def run() -> None:
        line = BatchQueue(rank, 100_000, 100_000, num_workers=2)
        reads = [desk.read(RerankRequest(f"muri {x}", CANDIDATES)) for x in "abc"]
        await asyncio.gather(*(line.submit(read, 30.0) for read in reads))
        # A worker that found nothing to do is gone: who comes now is not forgotten.
        await line.submit(reads[0], 30.0)

    asyncio.run(run())
    assert [len(batch) for batch, _ in gated.batches] == [3, 1]
    assert at_work == [1, 1]


def test_a_question_larger_than_the_budget_goes_alone(desk, gated):
    gated.may.set()

    async def run() -> RerankResult:
        line = BatchQueue(gated, 1, 10_000)
        return await line.submit(desk.read(RerankRequest("muri", CANDIDATES)), 30.0)

    assert asyncio.run(run()).model == "muri"


def test_who_finds_no_room_is_sent_away_and_told_when_to_come_again(desk, gated):
    tokens = desk.read(RerankRequest("muri a", CANDIDATES)).tokens

    async def run() -> None:
        line = BatchQueue(gated, tokens, 2 * tokens)
        tasks = await asking(line, desk, [f"muri {x}" for x in "abc"])
        with pytest.raises(RequestError) as refused:
            await line.submit(desk.read(RerankRequest("muri d", CANDIDATES)), 30.0)
        assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)
        gated.may.set()
        await asyncio.gather(*tasks)
        assert line.queued_tokens == 0
        await line.submit(desk.read(RerankRequest("muri e", CANDIDATES)), 30.0)

    asyncio.run(run())


def test_who_went_away_or_waited_too_long_is_not_ranked(desk, gated):
    async def run() -> None:
        line = BatchQueue(gated, 1, 100_000)
        first, gone = await asking(line, desk, ["muri a", "muri b"])
        [late] = await asking(line, desk, ["muri c"], within=-1.0)
        gone.cancel()
        await asyncio.sleep(0)
        gated.may.set()
        await first
        with pytest.raises(RequestError) as refused:
            await late
        assert refused.value.code == "too_late"

    asyncio.run(run())
    assert [batch for batch, _ in gated.batches] == [["muri a"]]


def test_a_question_that_fails_does_not_fail_those_ranked_with_it(desk, gated):
    def fails_on_b(batch, fullness, at_work) -> list[RerankResult]:
        answers = gated(batch, fullness, at_work)
        if "muri b" in [answer.model for answer in answers]:
            raise RuntimeError("scores that are not finite")
        return answers

    async def run() -> list[RerankResult | RequestError]:
        line = BatchQueue(fails_on_b, 100_000, 100_000)
        tasks = await asking(line, desk, ["muri a", "muri b", "muri c"])
        gated.may.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, wrong, last = asyncio.run(run())
    assert gated.batches[1][0] == ["muri b", "muri c"]
    assert (first.model, wrong.code, last.model) == ("muri a", "failed", "muri c")


def test_a_batch_that_fails_fails_its_own_questions_alone(desk):
    def fails_once(batch, fullness, at_work) -> list[RerankResult]:
        if batch[0].asked.question == "muri a":
            raise RuntimeError("/a/path/of/ours")
        return desk.rank(batch)

    async def run() -> None:
        line = BatchQueue(fails_once, 1, 100_000)
        with pytest.raises(RequestError) as refused:
            await line.submit(desk.read(RerankRequest("muri a", CANDIDATES)), 30.0)
        assert refused.value.code == "failed"
        assert "path" not in refused.value.message
        assert (await line.submit(desk.read(RerankRequest("muri b", CANDIDATES)), 30.0)).ranking

    asyncio.run(run())
