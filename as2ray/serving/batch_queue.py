"""Batches rerank requests by their number of tokens.

Batches form while the ranker is busy: a free worker takes the oldest requests, up to
`max_batch_tokens`. A lone request therefore never waits, and batches grow with the load.

`ray.serve.batch` accepts a size function too, but it closes a batch when its wait time is over,
whether or not the ranker is free. Under load its batches stay small and queue behind each other,
and a request that does not fit moves to the end of the queue.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from as2ray.serving.engine import TokenizedRequest
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

THROUGHPUT_SMOOTHING = 0.3
"""Weight of the newest batch in the moving average of tokens per second."""


@dataclass(eq=False)
class QueuedRequest:
    """A request with its deadline and the future that its client awaits."""

    request: TokenizedRequest
    deadline: float
    future: "asyncio.Future[Outcome]"


class BatchQueue:
    """Collects requests, ranks them in batches and returns each result to its caller.

    Args:
        rank_batch: Ranks one batch; called in a thread pool of `num_workers` threads.
        max_batch_tokens: Token budget of a batch. A larger request is ranked alone.
        max_queued_tokens: Requests beyond it are rejected, unless the queue is empty.
        num_workers: Batches that are ranked at the same time.
        on_change: Called with the queue after requests have entered or left it.
    """

    def __init__(
        self,
        rank_batch: RankBatch,
        max_batch_tokens: int,
        max_queued_tokens: int,
        num_workers: int = 1,
        on_change: "Callable[[BatchQueue], None]" = lambda queue: None,
    ) -> None:
        self.rank_batch, self.num_workers, self.on_change = rank_batch, num_workers, on_change
        self.max_batch_tokens, self.max_queued_tokens = max_batch_tokens, max_queued_tokens
        self.queue: deque[QueuedRequest] = deque()
        self.queued_tokens = 0
        self.tokens_per_second: float | None = None
        self._workers: set[asyncio.Task[None] | None] = set()
        self._running_batches = 0
        # A pool of its own: every thread that ranks keeps its own OpenMP threads.
        self._executor = ThreadPoolExecutor(num_workers, "rank")

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
        if queued and queued + request.num_tokens > limit:
            rate = self.tokens_per_second
            retry_after = 1 if rate is None else max(1, math.ceil(queued / rate))
            problem = f"{queued:,} tokens are queued, the limit is {limit:,}"
            raise overloaded_error(problem, retry_after)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.queue.append(QueuedRequest(request, time.monotonic() + timeout_s, future))
        self.queued_tokens += request.num_tokens
        self.on_change(self)
        if len(self._workers) < self.num_workers:
            self._workers.add(asyncio.create_task(self._run_worker()))
        outcome = await future
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def _run_worker(self) -> None:
        """Ranks batches until the queue is empty."""
        while self.queue:
            fill_level = self.fill_level
            batch = self._next_batch()
            self.on_change(self)
            if not batch:
                continue
            self._running_batches += 1
            started_at, running = time.monotonic(), self._running_batches
            requests = [queued.request for queued in batch]
            outcomes = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._rank, requests, fill_level, running
            )
            self._running_batches -= 1
            num_tokens = sum(request.num_tokens for request in requests)
            self._update_throughput(running * num_tokens / (time.monotonic() - started_at))
            for queued, outcome in zip(batch, outcomes):
                if not queued.future.done():
                    queued.future.set_result(outcome)
        self._workers.discard(asyncio.current_task())

    def _next_batch(self) -> list[QueuedRequest]:
        """Removes the oldest requests that fit one batch; drops cancelled and expired ones."""
        batch: list[QueuedRequest] = []
        num_tokens, now = 0, time.monotonic()
        while self.queue:
            queued = self.queue[0]
            if batch and num_tokens + queued.request.num_tokens > self.max_batch_tokens:
                break
            self.queue.popleft()
            self.queued_tokens -= queued.request.num_tokens
            if queued.future.done():  # the client disconnected
                continue
            if queued.deadline < now:
                queued.future.set_result(timeout_error(now - queued.request.received_at))
                continue
            batch.append(queued)
            num_tokens += queued.request.num_tokens
        return batch

    def _rank(
        self, requests: list[TokenizedRequest], fill_level: float, running: int
    ) -> list[Outcome]:
        try:
            return list(self.rank_batch(requests, fill_level, running))
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
        average = rate if self.tokens_per_second is None else self.tokens_per_second
        self.tokens_per_second = average + THROUGHPUT_SMOOTHING * (rate - average)
