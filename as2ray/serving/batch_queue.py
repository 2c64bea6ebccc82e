"""The line before the desks: who waits, who goes into the next batch, who is sent away.

Knows tokens and time. Must not know Ray, HTTP or how a batch is ranked.

Batches form while the ranker works: whatever waits when it is free goes in, first come first
served, up to a budget of tokens. So a lone request waits for nobody, and the busier the service
the fuller its batches. `ray.serve.batch` has a batch size function too, but closes a batch when its
wait is over, whether or not the ranker is free, so under load batches stay small and wait one
behind the other, and a question that does not fit goes to the end of the line.
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
from as2ray.serving.types import RequestError, RerankResult, internal_error, timeout_error

logger = logging.getLogger("ray.serve.as2ray")
"""Serve's own files take what goes here."""

RankBatch = Callable[
    [Sequence[TokenizedRequest], float, int], Sequence[RerankResult | RequestError]
]
"""Ranks a batch; the numbers: how full the waiting room is, from 0 to 1, and how many batches are
being ranked now, this one among them."""

THROUGHPUT_SMOOTHING = 0.3
"""Weight of the newest batch in the rate that tells how long to stay away."""


@dataclass(eq=False)
class QueuedRequest:
    request: TokenizedRequest
    deadline: float
    future: "asyncio.Future[RerankResult | RequestError]"


class BatchQueue:
    """Questions in order, and batches on their way.

    Args:
        rank: What ranks a batch; runs in one of as many threads as batches are ranked at a time.
        batch_tokens: Most tokens of a batch; a larger question goes alone.
        waiting_tokens: Most tokens that wait; a question that finds no room is sent away.
        side_by_side: Batches ranked at a time, where enough wait; what one leaves idle of the
            cores another uses.
    """

    def __init__(
        self,
        rank_batch: RankBatch,
        max_batch_tokens: int,
        max_queued_tokens: int,
        num_workers: int = 1,
    ) -> None:
        self.rank_batch, self.num_workers = rank_batch, num_workers
        self.max_batch_tokens, self.max_queued_tokens = max_batch_tokens, max_queued_tokens
        self.queue: deque[QueuedRequest] = deque()
        self.queued_tokens = 0
        """Waiting now."""
        self.tokens_per_second: float | None = None
        """Tokens a second, lately."""
        self._workers: set[asyncio.Task[None] | None] = set()
        self._running_batches = 0
        """Batches that are being ranked."""
        # Threads of its own: each thread that ranks has its own pool of OpenMP's.
        self._executor = ThreadPoolExecutor(num_workers, "ranking")

    async def submit(self, request: TokenizedRequest, timeout_s: float) -> RerankResult:
        """The answer to a question, when its turn came.

        Args:
            read: The question.
            within: Seconds after which nobody waits for it any more.

        Raises:
            Refused: No room, or too late.
        """
        if self.queued_tokens and self.queued_tokens + request.num_tokens > self.max_queued_tokens:
            raise self._overloaded()
        place = QueuedRequest(
            request, time.monotonic() + timeout_s, asyncio.get_running_loop().create_future()
        )
        self.queue.append(place)
        self.queued_tokens += request.num_tokens
        if len(self._workers) < self.num_workers:
            self._workers.add(asyncio.create_task(self._run_worker()))
        answer = await place.future
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def _overloaded(self) -> RequestError:
        wait = (
            1
            if self.tokens_per_second is None
            else math.ceil(self.queued_tokens / self.tokens_per_second)
        )
        return RequestError(
            "overloaded",
            f"{self.queued_tokens:,} tokens wait already"
            f"; expected at most {self.max_queued_tokens:,}",
            fix=f"ask again in {wait} s",
            retry_after=max(1, wait),
        )

    async def _run_worker(self) -> None:
        """Ranks batch after batch until nobody waits."""
        while self.queue:
            fullness = min(1.0, self.queued_tokens / self.max_queued_tokens)
            batch = self._next_batch()
            if not batch:
                continue
            self._running_batches += 1
            began, at_work = time.monotonic(), self._running_batches
            reads = [place.request for place in batch]
            answers = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._rank, reads, fullness, at_work
            )
            self._running_batches -= 1
            tokens = at_work * sum(read.num_tokens for read in reads)
            self._update_throughput(tokens / (time.monotonic() - began))
            for place, answer in zip(batch, answers):
                if not place.future.done():
                    place.future.set_result(answer)
        self._workers.discard(asyncio.current_task())

    def _next_batch(self) -> list[QueuedRequest]:
        """The next batch, in order; without those that nobody waits for any more."""
        batch: list[QueuedRequest] = []
        used, now = 0, time.monotonic()
        while self.queue and (
            not batch or used + self.queue[0].request.num_tokens <= self.max_batch_tokens
        ):
            place = self.queue.popleft()
            self.queued_tokens -= place.request.num_tokens
            if place.future.done():  # its client went away
                continue
            if place.deadline < now:
                place.future.set_result(timeout_error(now - place.request.received_at))
                continue
            batch.append(place)
            used += place.request.num_tokens
        return batch

    def _rank(
        self, requests: list[TokenizedRequest], fill_level: float, running: int
    ) -> Sequence[RerankResult | RequestError]:
        try:
            return self.rank_batch(requests, fill_level, running)
        except Exception:
            logger.exception("a batch of %d questions failed", len(requests))
            if len(requests) == 1:
                return [internal_error()]
        # One of them may be to blame, and the others are other users'.
        return [answer for read in requests for answer in self._rank([read], fill_level, running)]

    def _update_throughput(self, rate: float) -> None:
        self.tokens_per_second = (
            rate
            if self.tokens_per_second is None
            else self.tokens_per_second + THROUGHPUT_SMOOTHING * (rate - self.tokens_per_second)
        )
