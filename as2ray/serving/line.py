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

Rank = Callable[[Sequence[Read], float], Sequence[Answer | Refused]]
"""Ranks a batch; the number is how full the waiting room is, from 0 to 1."""

SMOOTHING = 0.3
"""Weight of the newest batch in the rate that tells how long to stay away."""


@dataclass(eq=False)
class _Place:
    read: Read
    expires: float
    answer: "asyncio.Future[Answer | Refused]"


class Line:
    """Questions in order, and one batch at a time on its way.

    Args:
        rank: What ranks a batch; runs in one thread, always the same.
        batch_tokens: Most tokens of a batch; a larger question goes alone.
        waiting_tokens: Most tokens that wait; a question that finds no room is sent away.
    """

    def __init__(self, rank: Rank, batch_tokens: int, waiting_tokens: int) -> None:
        self.rank, self.batch_tokens, self.room = rank, batch_tokens, waiting_tokens
        self.waiting: deque[_Place] = deque()
        self.tokens = 0
        """Waiting now."""
        self.rate: float | None = None
        """Tokens a second, lately."""
        self._worker: asyncio.Task[None] | None = None
        # A thread of its own: each thread that ranks would have its own pool of OpenMP's.
        self._thread = ThreadPoolExecutor(1, "ranking")

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
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
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
            began = time.monotonic()
            answers = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._rank, [place.read for place in batch], fullness
            )
            self._learn(sum(p.read.tokens for p in batch) / (time.monotonic() - began))
            for place, answer in zip(batch, answers):
                if not place.answer.done():
                    place.answer.set_result(answer)
        self._worker = None

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

    def _rank(self, batch: list[Read], fullness: float) -> Sequence[Answer | Refused]:
        try:
            return self.rank(batch, fullness)
        except Exception:
            LOGGER.exception("a batch of %d questions failed", len(batch))
            if len(batch) == 1:
                return [failed()]
        # One of them may be to blame, and the others are other users'.
        return [answer for read in batch for answer in self._rank([read], fullness)]

    def _learn(self, rate: float) -> None:
        self.rate = rate if self.rate is None else self.rate + SMOOTHING * (rate - self.rate)
