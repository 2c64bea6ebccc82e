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

from as2ray.serving.asked import Answer, Refused, failed, too_late
from as2ray.serving.desk import Read

LOGGER = logging.getLogger("ray.serve.as2ray")
"""Serve's own files take what goes here."""

Rank = Callable[[Sequence[Read], float, int], Sequence[Answer | Refused]]
"""Ranks a batch; the numbers: how full the waiting room is, from 0 to 1, and how many batches are
being ranked now, this one among them."""

SMOOTHING = 0.3
"""Weight of the newest batch in the rate that tells how long to stay away."""


@dataclass(eq=False)
class _Place:
    read: Read
    expires: float
    answer: "asyncio.Future[Answer | Refused]"


class Line:
    """Questions in order, and batches on their way.

    Args:
        rank: What ranks a batch; runs in one of as many threads as batches are ranked at a time.
        batch_tokens: Most tokens of a batch; a larger question goes alone.
        waiting_tokens: Most tokens that wait; a question that finds no room is sent away.
        side_by_side: Batches ranked at a time, where enough wait; what one leaves idle of the
            cores another uses.
    """

    def __init__(
        self, rank: Rank, batch_tokens: int, waiting_tokens: int, side_by_side: int = 1
    ) -> None:
        self.rank, self.side_by_side = rank, side_by_side
        self.batch_tokens, self.room = batch_tokens, waiting_tokens
        self.waiting: deque[_Place] = deque()
        self.tokens = 0
        """Waiting now."""
        self.rate: float | None = None
        """Tokens a second, lately."""
        self._workers: set[asyncio.Task[None] | None] = set()
        self._at_work = 0
        """Batches that are being ranked."""
        # Threads of its own: each thread that ranks has its own pool of OpenMP's.
        self._threads = ThreadPoolExecutor(side_by_side, "ranking")

    async def answer(self, read: Read, within: float) -> Answer:
        """The answer to a question, when its turn came.

        Args:
            read: The question.
            within: Seconds after which nobody waits for it any more.

        Raises:
            Refused: No room, or too late.
        """
        if self.tokens and self.tokens + read.tokens > self.room:
            raise self._full()
        place = _Place(read, time.monotonic() + within, asyncio.get_running_loop().create_future())
        self.waiting.append(place)
        self.tokens += read.tokens
        if len(self._workers) < self.side_by_side:
            self._workers.add(asyncio.create_task(self._work()))
        answer = await place.answer
        if isinstance(answer, Refused):
            raise answer
        return answer

    def _full(self) -> Refused:
        wait = 1 if self.rate is None else math.ceil(self.tokens / self.rate)
        return Refused(
            "overloaded",
            f"{self.tokens:,} tokens wait already",
            expected=f"at most {self.room:,}",
            mend=f"ask again in {wait} s",
            retry_after=max(1, wait),
        )

    async def _work(self) -> None:
        """Ranks batch after batch until nobody waits."""
        while self.waiting:
            fullness = min(1.0, self.tokens / self.room)
            batch = self._next()
            if not batch:
                continue
            self._at_work += 1
            began, at_work = time.monotonic(), self._at_work
            reads = [place.read for place in batch]
            answers = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._rank, reads, fullness, at_work
            )
            self._at_work -= 1
            tokens = at_work * sum(read.tokens for read in reads)
            self._learn(tokens / (time.monotonic() - began))
            for place, answer in zip(batch, answers):
                if not place.answer.done():
                    place.answer.set_result(answer)
        self._workers.discard(asyncio.current_task())

    def _next(self) -> list[_Place]:
        """The next batch, in order; without those that nobody waits for any more."""
        batch: list[_Place] = []
        used, now = 0, time.monotonic()
        while self.waiting and (
            not batch or used + self.waiting[0].read.tokens <= self.batch_tokens
        ):
            place = self.waiting.popleft()
            self.tokens -= place.read.tokens
            if place.answer.done():  # its client went away
                continue
            if place.expires < now:
                place.answer.set_result(too_late(now - place.read.arrived))
                continue
            batch.append(place)
            used += place.read.tokens
        return batch

    def _rank(self, batch: list[Read], fullness: float, at_work: int) -> Sequence[Answer | Refused]:
        try:
            return self.rank(batch, fullness, at_work)
        except Exception:
            LOGGER.exception("a batch of %d questions failed", len(batch))
            if len(batch) == 1:
                return [failed()]
        # One of them may be to blame, and the others are other users'.
        return [answer for read in batch for answer in self._rank([read], fullness, at_work)]

    def _learn(self, rate: float) -> None:
        self.rate = rate if self.rate is None else self.rate + SMOOTHING * (rate - self.rate)
