"""Batches rerank requests by their number of tokens.

Batches form while the ranker is busy: a free worker takes the first requests, up to
`max_batch_tokens`. A lone request therefore never waits, and batches grow with the load.

Requests are ordered by when each would end if it took `MAX_SLOWDOWN` times as long as alone: small
requests overtake large ones, but not for ever. Requests of one client, where
clients have tokens, follow each other in this order, so that clients share the ranker evenly. A
large batch is ranked in parts, and between parts lets requests go first that are much smaller than
its largest.

A request with a budget is ranked alone, and comes no later in this order than its deadline. It
takes the time that it has, but leaves waiting ones as long as recent ones took. An even share of
the time is its own in any case.

`ray.serve.batch` accepts a size function too, but it closes a batch when its wait time is over,
whether or not the ranker is free. Under load its batches stay small and queue behind each other,
and a request that does not fit moves to the end of the queue.
"""

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from as2ray.models.ranker import BEFORE_BATCH
from as2ray.serving.engine import RESPONSE_S, TokenizedRequest
from as2ray.serving.types import (
    RequestError,
    RerankResult,
    internal_error,
    overloaded_error,
    timeout_error,
)

logger = logging.getLogger("ray.serve.as2ray")  # Ray Serve's own log files take its records

Outcome = RerankResult | RequestError
RankBatch = Callable[[list[TokenizedRequest], float, int], Sequence[Outcome]]
"""Ranks a batch, given the fill level of the queue (0 to 1) and the number of running batches."""

SMOOTHING = 0.3
"""Weight of the newest batch in the moving averages of tokens per second, and of the seconds that a
request with a budget takes."""

INITIAL_TOKENS_PER_SECOND = 10_000.0
"""Assumed throughput before the first batch."""

MAX_SLOWDOWN = 8.0
"""Smaller requests overtake one for so many times the time that it takes alone."""

URGENT_S = 1.0
"""A request with a budget of which less is left is not interrupted."""

SMALLER = 0.5
"""Requests of at most this share of the tokens of a batch's largest request may interrupt it."""


@dataclass(order=True)
class QueuedRequest:
    """A request with its deadline and the future that its client awaits."""

    virtual_end: float
    """When it would end if it took `MAX_SLOWDOWN` times as long as alone, or its deadline."""
    number: int
    request: TokenizedRequest = field(compare=False)
    deadline: float = field(compare=False)
    future: "asyncio.Future[Outcome]" = field(compare=False)


class BatchAbandonedError(Exception):
    """All clients of a batch have disconnected."""


def moving_average(average: float | None, newest: float) -> float:
    """Takes the newest value into an average; None if there is none yet."""
    return newest if average is None else average + SMOOTHING * (newest - average)


def num_tokens_of(batch: Iterable[QueuedRequest]) -> int:
    """Returns the number of tokens of a batch."""
    return sum(queued.request.num_tokens for queued in batch)


class BatchQueue:
    """Collects requests, ranks them in batches and returns each result to its caller.

    Args:
        rank_batch: Ranks one batch; called in a thread pool of `num_workers` threads.
        max_batch_tokens: Token budget of a batch. A larger request is ranked alone.
        max_queued_tokens: Requests beyond it are rejected, unless the queue is empty.
        max_queue_s: Seconds of work beyond which requests are rejected, at the measured rate.
        num_workers: Batches that are ranked at the same time.
        on_change: Called with the queue after requests have entered or left it.
        on_batch: Called with the number of tokens and the duration of each batch, without the
            batches that interrupted it.
    """

    def __init__(
        self,
        rank_batch: RankBatch,
        max_batch_tokens: int,
        max_queued_tokens: int,
        max_queue_s: float | None = None,
        num_workers: int = 1,
        on_change: "Callable[[BatchQueue], None]" = lambda queue: None,
        on_batch: Callable[[int, float], None] = lambda num_tokens, duration_s: None,
    ) -> None:
        self.rank_batch, self.num_workers = rank_batch, num_workers
        self.on_change, self.on_batch = on_change, on_batch
        self.max_batch_tokens, self._max_queued_tokens = max_batch_tokens, max_queued_tokens
        self.max_queue_s = max_queue_s
        self.queue: list[QueuedRequest] = []
        """A heap."""
        self._numbers = itertools.count()
        self._virtual_end_of_client: dict[str, float] = {}
        self._queued_tokens_of_client: Counter[str | None] = Counter()
        self.queued_tokens = 0
        self.tokens_per_second: float | None = None
        self._mean_budgeted_s: float | None = None
        """Mean seconds that a request with a budget takes."""
        self._workers: set[asyncio.Task[None] | None] = set()
        self._running_batches = 0
        # A pool of its own: every thread that ranks keeps its own OpenMP threads.
        self._executor = ThreadPoolExecutor(num_workers, "rank")

    @property
    def max_queued_tokens(self) -> int:
        """Tokens that may be queued at the rate of the last batches."""
        if self.max_queue_s is None or self.tokens_per_second is None:
            return self._max_queued_tokens
        return min(self._max_queued_tokens, math.ceil(self.max_queue_s * self.tokens_per_second))

    @property
    def fill_level(self) -> float:
        """How full the queue is, from 0 to 1."""
        return min(1.0, self.queued_tokens / self.max_queued_tokens)

    async def submit(self, request: TokenizedRequest, timeout_s: float) -> RerankResult:
        """Queues a request and waits for its result.

        Raises:
            RequestError: The queue is full, the time is over, or ranking failed.
        """
        queued, limit = self.queued_tokens, self.max_queued_tokens
        now, client = time.monotonic(), request.request.client
        # A client may queue as much as it leaves to others, so none fills the queue (the dynamic
        # threshold of Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
        reserved = self._queued_tokens_of_client[client] if client else 0
        if queued and queued + reserved + request.num_tokens > limit:
            rate = self.tokens_per_second
            retry_after = 1 if rate is None else max(1, math.ceil(queued / rate))
            problem = f"{queued:,} tokens are queued, the limit is {limit:,}"
            raise overloaded_error(problem, retry_after)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        start = max(now, self._virtual_end_of_client.get(client, now)) if client else now
        duration_s = request.num_tokens / (self.tokens_per_second or INITIAL_TOKENS_PER_SECOND)
        if request.has_budget:
            duration_s = min(duration_s, max(0.0, request.ends_at - now))
            request.limit_time = self._limit_time
        if client:
            self._virtual_end_of_client[client] = start + duration_s
        # Requests of a client follow each other, whatever their deadlines.
        end = max(start, min(start + MAX_SLOWDOWN * duration_s, request.ends_at))
        queued_request = QueuedRequest(end, next(self._numbers), request, now + timeout_s, future)
        heapq.heappush(self.queue, queued_request)
        self.queued_tokens += request.num_tokens
        self._queued_tokens_of_client[client] += request.num_tokens
        self.on_change(self)
        if len(self._workers) < self.num_workers:
            self._workers.add(asyncio.create_task(self._run_worker()))
        outcome = await future
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def _limit_time(self, left_s: float) -> float:
        """Returns the seconds that a request may take of those until its deadline.

        It ends early enough for those that wait to be ranked before their deadlines, if each takes
        as long as recent ones; an even share of the seconds is its own in any case.
        """
        ends = sorted(
            queued.request.ends_at for queued in tuple(self.queue) if queued.request.has_budget
        )
        even_s = (
            left_s * self.num_workers / max(self.num_workers, len(ends) + self._running_batches)
        )
        if self._mean_budgeted_s is None:
            return even_s
        each_s, now = self._mean_budgeted_s / self.num_workers, time.monotonic() + RESPONSE_S
        latest_s = (end - now - place * each_s for place, end in enumerate(ends, 1))
        return max(even_s, min([left_s, *latest_s]))

    async def _run_worker(self) -> None:
        """Ranks batches until the queue is empty."""
        while self.queue:
            fill_level = self.fill_level
            batch = self._next_batch()
            self.on_change(self)
            if not batch:
                continue
            self._running_batches += 1
            running, loop = self._running_batches, asyncio.get_running_loop()
            outcomes, duration_s = await loop.run_in_executor(
                self._executor, self._rank_in_turns, batch, fill_level, running, loop
            )
            self._running_batches -= 1
            is_abandoned = all(queued.future.done() for queued in batch)
            # With a budget, or without clients, tokens do not pass all layers.
            if not (batch[0].request.has_budget or is_abandoned):
                self._update_throughput(running * num_tokens_of(batch) / duration_s)
            self._send(batch, outcomes)
        self._workers.discard(asyncio.current_task())

    def _send(self, batch: list[QueuedRequest], outcomes: list[Outcome]) -> None:
        for queued, outcome in zip(batch, outcomes):
            if not queued.future.done():
                queued.future.set_result(outcome)

    def _next_batch(
        self, before: float = math.inf, max_request_tokens: float = math.inf
    ) -> list[QueuedRequest]:
        """Removes the first requests that fit one batch; drops cancelled and expired ones.

        Args:
            before: Virtual end that requests must be before.
            max_request_tokens: Maximum number of tokens of each.
        """
        batch: list[QueuedRequest] = []
        num_tokens, now = 0, time.monotonic()
        while self.queue:
            queued = self.queue[0]
            size, has_budget = queued.request.num_tokens, queued.request.has_budget
            if batch and (has_budget or num_tokens + size > self.max_batch_tokens):
                break
            is_small = has_budget or size <= max_request_tokens
            if queued.virtual_end >= before or not is_small:
                break
            heapq.heappop(self.queue)
            self.queued_tokens -= size
            self._queued_tokens_of_client[queued.request.request.client] -= size
            if queued.future.done():  # the client disconnected
                continue
            if queued.deadline < now and not has_budget:
                queued.future.set_result(timeout_error(now - queued.request.received_at))
                continue
            batch.append(queued)
            num_tokens += size
            if has_budget:
                break
        return batch

    def _rank_in_turns(
        self,
        batch: list[QueuedRequest],
        fill_level: float,
        running: int,
        loop: asyncio.AbstractEventLoop,
    ) -> tuple[list[Outcome], float]:
        """Ranks a batch in a thread; between its parts, smaller requests go first.

        Returns:
            The outcomes, and the seconds that the batch took by itself.
        """
        started_at, interrupted_s = time.monotonic(), 0.0
        last_end, num_tokens = max(batch).virtual_end, num_tokens_of(batch)
        # Not of the whole batch: requests of about one size would interrupt each other.
        max_request_tokens = SMALLER * max(queued.request.num_tokens for queued in batch)
        # On a GPU two threads rank parts of a batch; interruptions side by side would add up.
        lock = Lock()

        async def take_smaller() -> list[QueuedRequest]:
            smaller = self._next_batch(last_end, max_request_tokens)
            self.on_change(self)
            return smaller

        def before_part() -> None:
            nonlocal interrupted_s
            with lock:
                if all(queued.future.done() for queued in batch):
                    raise BatchAbandonedError
                if not self.queue or batch[0].request.ends_at - time.monotonic() < URGENT_S:
                    return
                smaller = asyncio.run_coroutine_threadsafe(take_smaller(), loop).result()
                if smaller:
                    interrupted_at = time.monotonic()
                    outcomes, _ = self._rank_in_turns(smaller, fill_level, running, loop)
                    loop.call_soon_threadsafe(self._send, smaller, outcomes)
                    interrupted_s += time.monotonic() - interrupted_at

        reset_token = BEFORE_BATCH.set(before_part)
        try:
            outcomes = self._rank([queued.request for queued in batch], fill_level, running)
        finally:
            BEFORE_BATCH.reset(reset_token)
        duration_s = time.monotonic() - started_at - interrupted_s
        self.on_batch(num_tokens, duration_s)
        if batch[0].request.has_budget:
            self._mean_budgeted_s = moving_average(self._mean_budgeted_s, duration_s)
        return outcomes, duration_s

    def _rank(
        self, requests: list[TokenizedRequest], fill_level: float, running: int
    ) -> list[Outcome]:
        try:
            return list(self.rank_batch(requests, fill_level, running))
        except BatchAbandonedError:
            return [internal_error()] * len(requests)  # nobody reads it
        except Exception:
            logger.exception("ranking a batch of %d requests failed", len(requests))
            if len(requests) == 1:
                return [internal_error()]
        # One request may have caused the failure; the others belong to other users.
        return [
            outcome
            for request in requests
            for outcome in self._rank([request], fill_level, running)
        ]

    def _update_throughput(self, rate: float) -> None:
        self.tokens_per_second = moving_average(self.tokens_per_second, rate)
