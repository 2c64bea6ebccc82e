"""The queue before the engines, without HTTP."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
from served import CANDIDATES, with_budget

from as2ray.models.ranker import BEFORE_BATCH
from as2ray.serving.batch_queue import MAX_SLOWDOWN, BatchQueue
from as2ray.serving.types import RequestError, RerankRequest, RerankResult


class BlockingRanker:
    """Ranks once `release` is set; keeps the questions of each batch and its fill level."""

    def __init__(self) -> None:
        self.release, self.batches = threading.Event(), []

    def __call__(self, batch, fill_level, running) -> list[RerankResult]:
        assert self.release.wait(30)
        self.batches.append(([t.request.question for t in batch], fill_level))
        return [RerankResult(t.request.question, [], t.num_tokens) for t in batch]


@pytest.fixture
def blocking() -> BlockingRanker:
    return BlockingRanker()


async def submit_all(queue, engine, names, timeout_s=30.0) -> list[asyncio.Task]:
    """Submits requests one after the other; a free worker takes the first."""
    tasks = []
    for name in names:
        tokenized = engine.tokenize(RerankRequest(name, CANDIDATES, "m"))
        tasks.append(asyncio.create_task(queue.submit(tokenized, timeout_s)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


def test_requests_with_a_budget_are_ranked_alone_by_their_deadlines_and_share_their_time(
    engine, blocking
):
    limits_s = []

    async def run():
        queue = BatchQueue(blocking, 10_000, 1_000_000)
        queue.tokens_per_second = 100.0  # one takes about a second
        requests = [RerankRequest(f"muri {x}", CANDIDATES, "m") for x in "abc"]
        requests += [with_budget(ms, f"muri {ms}") for ms in (900, 300, 600)]
        tasks = []
        for request in requests:
            tokenized = engine.tokenize(request)
            tasks.append(asyncio.create_task(queue.submit(tokenized, 30.0)))
            for _ in range(2):
                await asyncio.sleep(0)
            if tokenized.has_budget:
                limits_s.append(tokenized.limit_time(1.0))
        blocking.release.set()
        await asyncio.gather(*tasks)
        return queue

    queue = asyncio.run(run())
    names = [[name.removeprefix("muri ") for name in batch] for batch, _ in blocking.batches]
    assert names == [["a"], ["300"], ["600"], ["900"], ["b", "c"]]
    # One is ranked, and one, two and three with a budget wait.
    assert limits_s == [1 / 2, 1 / 3, 1 / 4]
    assert queue._limit_time(1.0) == 1.0


def test_request_with_a_budget_leaves_those_that_wait_what_the_last_ones_took(engine):
    limits_s = []

    def rank(batch, fill_level, running):
        [tokenized] = batch
        time.sleep(0.05)
        limits_s.append([tokenized.limit_time(left_s) for left_s in (100.0, 6.0, 1.0)])
        return [RerankResult("m", [], tokenized.num_tokens)]

    async def run():
        queue = BatchQueue(rank, 10_000, 1_000_000)
        await queue.submit(engine.tokenize(with_budget(9_000, "muri alone")), 30.0)
        requests = [engine.tokenize(with_budget(ms, f"muri {ms}")) for ms in (3_000, 5_000, 5_200)]
        await asyncio.gather(*[queue.submit(request, 30.0) for request in requests])

    asyncio.run(run())
    alone, first, second, third = limits_s
    assert alone == third == [100.0, 6.0, 1.0]
    # One that could take a hundred seconds may take a third of them. One of six seconds may take
    # more than its even share, but must leave the next one as long as a request takes.
    assert (first[0], first[2]) == (pytest.approx(100 / 3), 1.0)
    assert 2.5 < first[1] < 5 - 0.05 - 0.05
    assert (second[0], second[2]) == (pytest.approx(50), 1.0)
    assert 3.5 < second[1] < 5.2 - 2 * 0.05 - 0.05


def test_several_workers_share_the_requests_that_a_budget_leaves_time_for(engine, blocking):
    async def run():
        queue = BatchQueue(blocking, 10_000, 1_000_000, num_workers=2)
        queue._mean_budgeted_s = 40.0
        blocking.release.set()
        requests = [engine.tokenize(with_budget(600_000, f"muri {x}")) for x in "abcd"]
        waiting = [asyncio.create_task(queue.submit(each, 30.0)) for each in requests]
        await asyncio.sleep(0)
        limit_s = queue._limit_time(1_000.0)
        await asyncio.gather(*waiting)
        return limit_s

    # Two workers take 20 s for each, so the last one must begin 80 s before its deadline. An even
    # share would be 500 s.
    assert 510 < asyncio.run(run()) < 520


def test_request_with_a_budget_is_answered_although_its_time_is_over(engine, blocking):
    async def run():
        queue = BatchQueue(blocking, 10_000, 100_000)
        tasks = await submit_all(queue, engine, ["muri a"])
        late = engine.tokenize(with_budget(1, "muri late"))
        tasks.append(asyncio.create_task(queue.submit(late, 0.0)))
        await asyncio.sleep(0.05)
        blocking.release.set()
        return await asyncio.gather(*tasks)

    assert [result.model for result in asyncio.run(run())] == ["muri a", "muri late"]


def test_batches_form_while_the_ranker_works_in_order_and_within_the_budget(engine, blocking):
    tokens = engine.tokenize(RerankRequest("muri a", CANDIDATES, "m")).num_tokens

    lengths = []

    async def run() -> list[RerankResult]:
        queue = BatchQueue(
            blocking, 2 * tokens, 100 * tokens, on_change=lambda q: lengths.append(len(q.queue))
        )
        tasks = await submit_all(queue, engine, [f"muri {x}" for x in "abcdef"])
        blocking.release.set()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    assert [answer.model for answer in answers] == [f"muri {x}" for x in "abcdef"]
    names = [[name[-1] for name in batch] for batch, _ in blocking.batches]
    assert names == [["a"], ["b", "c"], ["d", "e"], ["f"]]
    assert blocking.batches[1][1] > blocking.batches[2][1] > 0
    assert lengths == [1, 0, 1, 2, 3, 4, 5, 3, 1, 0]


def test_two_batches_are_ranked_side_by_side_where_enough_wait(engine):
    met, seen = threading.Barrier(2), []

    def rank(batch, _, at_work) -> list[RerankResult]:
        met.wait(30)  # alone it would wait for ever
        seen.append(at_work)
        return engine.rank(batch)

    async def run() -> list[RerankResult]:
        queue = BatchQueue(rank, 1, 100_000, num_workers=2)
        tasks = await submit_all(queue, engine, [f"muri {x}" for x in "abcdef"])
        answers = await asyncio.gather(*tasks)
        assert queue.queued_tokens == 0
        return answers

    assert len(asyncio.run(run())) == 6
    assert sorted(seen[:2]) == [1, 2]
    assert set(seen[2:]) <= {1, 2}


def test_the_speed_of_the_queue_is_that_of_all_workers_together(engine):
    met, running_in, rates = threading.Barrier(2), {}, []

    def rank(batch, _, running) -> list[RerankResult]:
        running_in[threading.get_ident()] = running
        met.wait(30)
        return engine.rank(batch)

    def record_rate(num_tokens, duration_s) -> None:
        rates.append(running_in[threading.get_ident()] * num_tokens / duration_s)

    async def run() -> float:
        queue = BatchQueue(rank, 1, 100_000, num_workers=2, on_batch=record_rate)
        await asyncio.gather(*await submit_all(queue, engine, ["muri a", "muri b"]))
        return queue.tokens_per_second

    speed = asyncio.run(run())
    assert sorted(running_in.values()) == [1, 2]
    averages = [first + 0.3 * (second - first) for first, second in (rates, rates[::-1])]
    assert any(speed == pytest.approx(average) for average in averages)


def test_questions_that_come_at_once_are_one_batch_with_all_cores(engine, blocking):
    blocking.release.set()
    at_work = []

    def rank(batch, fullness, busy) -> list[RerankResult]:
        at_work.append(busy)
        return blocking(batch, fullness, busy)

    async def run() -> None:
        queue = BatchQueue(rank, 100_000, 100_000, num_workers=2)
        reads = [engine.tokenize(RerankRequest(f"muri {x}", CANDIDATES, "m")) for x in "abc"]
        await asyncio.gather(*(queue.submit(read, 30.0) for read in reads))
        # A worker that found nothing to do is gone: who comes now is not forgotten.
        await queue.submit(reads[0], 30.0)

    asyncio.run(run())
    assert [len(batch) for batch, _ in blocking.batches] == [3, 1]
    assert at_work == [1, 1]


def test_a_question_larger_than_the_budget_goes_alone(engine, blocking):
    blocking.release.set()

    async def run() -> RerankResult:
        queue = BatchQueue(blocking, 1, 10_000)
        return await queue.submit(engine.tokenize(RerankRequest("muri", CANDIDATES, "m")), 30.0)

    assert asyncio.run(run()).model == "muri"


def test_who_finds_no_room_is_sent_away_and_told_when_to_come_again(engine, blocking):
    tokens = engine.tokenize(RerankRequest("muri a", CANDIDATES, "m")).num_tokens

    async def run() -> None:
        queue = BatchQueue(blocking, tokens, 2 * tokens)
        tasks = await submit_all(queue, engine, [f"muri {x}" for x in "abc"])
        with pytest.raises(RequestError) as refused:
            await queue.submit(engine.tokenize(RerankRequest("muri d", CANDIDATES, "m")), 30.0)
        assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)
        blocking.release.set()
        await asyncio.gather(*tasks)
        assert queue.queued_tokens == 0
        await queue.submit(engine.tokenize(RerankRequest("muri e", CANDIDATES, "m")), 30.0)

    asyncio.run(run())


def test_queue_bounded_in_seconds_holds_what_the_measured_rate_ranks_in_them(engine, blocking):
    tokens = engine.tokenize(RerankRequest("muri a", CANDIDATES, "m")).num_tokens

    async def run() -> None:
        queue = BatchQueue(blocking, tokens, 100 * tokens, max_queue_s=2.0)
        assert queue.max_queued_tokens == 100 * tokens  # no rate is known
        queue.tokens_per_second = float(tokens)
        assert queue.max_queued_tokens == 2 * tokens
        tasks = await submit_all(queue, engine, [f"muri {x}" for x in "abc"])
        assert queue.fill_level == 1.0
        with pytest.raises(RequestError, match=f"the limit is {2 * tokens:,}"):
            await queue.submit(engine.tokenize(RerankRequest("muri d", CANDIDATES, "m")), 30.0)
        blocking.release.set()
        await asyncio.gather(*tasks)
        queue.tokens_per_second = 1_000.0 * tokens
        assert queue.max_queued_tokens == 100 * tokens

    asyncio.run(run())


def test_who_went_away_or_waited_too_long_is_not_ranked(engine, blocking):
    async def run() -> None:
        queue = BatchQueue(blocking, 1, 100_000)
        first, gone = await submit_all(queue, engine, ["muri a", "muri b"])
        [late] = await submit_all(queue, engine, ["muri c"], timeout_s=-1.0)
        gone.cancel()
        await asyncio.sleep(0)
        blocking.release.set()
        await first
        with pytest.raises(RequestError) as refused:
            await late
        assert refused.value.code == "timeout"

    asyncio.run(run())
    assert [batch for batch, _ in blocking.batches] == [["muri a"]]


def test_a_question_that_fails_does_not_fail_those_ranked_with_it(engine, blocking):
    def fails_on_b(batch, fullness, at_work) -> list[RerankResult]:
        answers = blocking(batch, fullness, at_work)
        if "muri b" in [answer.model for answer in answers]:
            raise RuntimeError("scores that are not finite")
        return answers

    async def run() -> list[RerankResult | RequestError]:
        queue = BatchQueue(fails_on_b, 100_000, 100_000)
        tasks = await submit_all(queue, engine, ["muri a", "muri b", "muri c"])
        blocking.release.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, wrong, last = asyncio.run(run())
    assert blocking.batches[1][0] == ["muri b", "muri c"]
    assert (first.model, wrong.code, last.model) == ("muri a", "internal_error", "muri c")


def test_a_batch_that_fails_fails_its_own_questions_alone(engine):
    def fails_once(batch, fullness, at_work) -> list[RerankResult]:
        if batch[0].request.question == "muri a":
            raise RuntimeError("/a/path/of/ours")
        return engine.rank(batch)

    async def run() -> None:
        queue = BatchQueue(fails_once, 1, 100_000)
        with pytest.raises(RequestError) as refused:
            await queue.submit(engine.tokenize(RerankRequest("muri a", CANDIDATES, "m")), 30.0)
        assert refused.value.code == "internal_error"
        assert "path" not in refused.value.message
        assert (
            await queue.submit(engine.tokenize(RerankRequest("muri b", CANDIDATES, "m")), 30.0)
        ).ranking

    asyncio.run(run())


class PartsRanker:
    """Ranks each request in as many parts as it has candidates, one of `PART_S` after the other."""

    PART_S = 0.02

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.num_parts = 0

    def __call__(self, batch, fill_level, running) -> list[RerankResult]:
        for tokenized in batch:
            for _ in tokenized.request.candidates:
                if before := BEFORE_BATCH.get():
                    before()
                time.sleep(self.PART_S)
                self.num_parts += 1
            self.ended.append(tokenized.request.question)
        return [RerankResult(t.request.question, [], t.num_tokens) for t in batch]


@pytest.mark.parametrize(
    ("budget_ms", "is_interrupted"), [(None, True), (60_000, True), (900, False)]
)
def test_small_requests_go_first_between_the_parts_of_a_large_one_that_is_not_urgent(
    engine, budget_ms, is_interrupted
):
    ranker = PartsRanker()

    async def run() -> tuple[float, float]:
        queue = BatchQueue(ranker, 512, 100_000)
        queue.tokens_per_second = 100.0
        queue._update_throughput = lambda rate: None
        request = RerankRequest("muri large", CANDIDATES * 10, "m")
        if budget_ms is not None:
            request = with_budget(budget_ms, "muri large", CANDIDATES * 10)
        large = engine.tokenize(request)
        started_at = time.monotonic()
        task = asyncio.create_task(queue.submit(large, 30.0))
        await asyncio.sleep(0.1)
        small_s = []
        for number in range(5):
            small = engine.tokenize(RerankRequest(f"muri {number}", CANDIDATES[:1], "m"))
            asked_at = time.monotonic()
            await queue.submit(small, 30.0)
            small_s.append(time.monotonic() - asked_at)
        await task
        assert queue.queued_tokens == 0
        return max(small_s), time.monotonic() - started_at

    small_s, large_s = asyncio.run(run())
    small = [f"muri {number}" for number in range(5)]
    assert ranker.ended == ([*small, "muri large"] if is_interrupted else ["muri large", *small])
    assert small_s < 0.5 * large_s or not is_interrupted


@pytest.mark.parametrize(("num_candidates", "is_interrupted"), [(2, False), (1, True)])
def test_a_batch_is_interrupted_by_requests_much_smaller_than_its_largest(
    engine, num_candidates, is_interrupted
):
    ranker = PartsRanker()

    async def run() -> None:
        queue = BatchQueue(ranker, 100_000, 100_000)
        queue.tokens_per_second = 100.0
        queue._update_throughput = lambda rate: None
        names = ["muri a", "muri b", "muri c"]
        batch = [engine.tokenize(RerankRequest(name, CANDIDATES[:3], "m")) for name in names]
        tasks = [asyncio.create_task(queue.submit(tokenized, 30.0)) for tokenized in batch]
        await asyncio.sleep(1.5 * PartsRanker.PART_S)
        request = RerankRequest("muri late", CANDIDATES[:num_candidates], "m")
        await asyncio.gather(*tasks, queue.submit(engine.tokenize(request), 30.0))

    asyncio.run(run())
    assert (ranker.ended[0] == "muri late") is is_interrupted
    assert len(ranker.ended) == 4


def test_threads_that_rank_parts_of_a_batch_are_interrupted_one_after_the_other(engine):
    small_at_work, most_at_work, ranked = [], [], threading.Event()

    def rank(batch, fill_level, running) -> list[RerankResult]:
        [question] = [tokenized.request.question for tokenized in batch]
        if question == "muri large":

            def run_parts() -> None:
                for _ in range(20):
                    BEFORE_BATCH.get()()
                    time.sleep(PartsRanker.PART_S)

            with ThreadPoolExecutor(2) as pool:
                contexts = [copy_context() for _ in range(2)]
                for ended in [pool.submit(context.run, run_parts) for context in contexts]:
                    ended.result()
        else:
            small_at_work.append(question)
            most_at_work.append(len(small_at_work))
            ranked.set()
            time.sleep(5 * PartsRanker.PART_S)
            small_at_work.remove(question)
        return [RerankResult(question, [], 1)]

    async def run() -> None:
        queue = BatchQueue(rank, 512, 100_000)
        queue.tokens_per_second = 100.0
        queue._update_throughput = lambda rate: None
        names = ["muri large", "muri 1", "muri 2"]
        tasks = []
        for name, candidates in zip(names, (CANDIDATES * 10, CANDIDATES[:1], CANDIDATES[:1])):
            request = engine.tokenize(RerankRequest(name, candidates, "m"))
            tasks.append(asyncio.create_task(queue.submit(request, 30.0)))
            if name == "muri 1":
                await asyncio.to_thread(ranked.wait, 30)
            await asyncio.sleep(PartsRanker.PART_S)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert most_at_work == [1, 1]


def test_small_requests_overtake_a_large_one_but_not_for_ever(engine, blocking):
    blocking.release.set()

    async def run() -> list[str]:
        queue = BatchQueue(blocking, 1, 100_000)
        queue.tokens_per_second = 10_000.0
        large = engine.tokenize(RerankRequest("large", CANDIDATES, "m"))
        duration_s = MAX_SLOWDOWN * large.num_tokens / 10_000.0
        small = engine.tokenize(RerankRequest("small", CANDIDATES[:1], "m"))
        late = engine.tokenize(RerankRequest("late", CANDIDATES[:1], "m"))
        queue._workers.add(None)  # nothing is ranked yet
        tasks = [asyncio.create_task(queue.submit(one, 30.0)) for one in (large, small)]
        await asyncio.sleep(duration_s)
        tasks.append(asyncio.create_task(queue.submit(late, 30.0)))
        await asyncio.sleep(0)
        queue._workers.clear()
        await queue._run_worker()
        await asyncio.gather(*tasks)
        return [name for [name], _ in blocking.batches]

    assert asyncio.run(run()) == ["small", "large", "late"]


def test_clients_with_tokens_share_evenly_whatever_one_sends(engine, blocking):
    blocking.release.set()

    async def run() -> list[str]:
        queue = BatchQueue(blocking, 1, 100_000)
        queue.tokens_per_second = 1_000.0
        queue._workers.add(None)
        asked = [("greedy", "a")] * 4 + [("modest", "b")] * 2
        tasks = []
        for name, client in asked:
            tokenized = engine.tokenize(RerankRequest(name, CANDIDATES, "m", client=client))
            tasks.append(asyncio.create_task(queue.submit(tokenized, 30.0)))
            await asyncio.sleep(0)
        queue._workers.clear()
        await queue._run_worker()
        await asyncio.gather(*tasks)
        return [name for [name], _ in blocking.batches]

    assert sorted(asyncio.run(run())[:4]) == ["greedy", "greedy", "modest", "modest"]


def test_client_with_a_token_fills_no_more_of_the_queue_than_it_leaves_to_others(engine, blocking):
    num_tokens = engine.tokenize(RerankRequest("muri", CANDIDATES, "m")).num_tokens

    def submit(queue, client) -> asyncio.Task:
        tokenized = engine.tokenize(RerankRequest("muri", CANDIDATES, "m", client=client))
        return asyncio.create_task(queue.submit(tokenized, 30.0))

    async def run() -> None:
        for greedy, num_queued in (("greedy", 4), (None, 8)):
            queue = BatchQueue(blocking, 1, 8 * num_tokens)
            queue._workers.add(None)  # nothing is ranked yet
            tasks = [submit(queue, greedy) for _ in range(20)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert queue.queued_tokens == num_queued * num_tokens
            modest = submit(queue, "modest")
            await asyncio.sleep(0)
            assert (queue.queued_tokens > num_queued * num_tokens) is (greedy is not None)
            blocking.release.set()
            queue._workers.clear()
            await queue._run_worker()
            await asyncio.gather(*tasks, modest, return_exceptions=True)
            assert not any(queue._queued_tokens_of_client.values())

    asyncio.run(run())


def test_the_work_of_a_client_that_left_stops_at_the_next_part(engine):
    ranker = PartsRanker()

    async def run() -> None:
        queue = BatchQueue(ranker, 512, 100_000)
        large = engine.tokenize(RerankRequest("muri large", CANDIDATES * 20, "m"))
        task = asyncio.create_task(queue.submit(large, 30.0))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(*queue._workers)
        assert queue.tokens_per_second is None  # what is left unranked is no measure of speed
        small = engine.tokenize(RerankRequest("muri small", CANDIDATES[:1], "m"))
        await queue.submit(small, 30.0)
        assert queue.tokens_per_second

    asyncio.run(run())
    assert ranker.num_parts < 60
    assert ranker.ended == ["muri small"]
