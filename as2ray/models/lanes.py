"""Packed batches side by side on a CPU: a core for each, in place of all cores for one.

Knows torch's threads. Must not know rankers.

A small encoder's operations are too short to be shared: after each, cores wait for one another, and
the more so where another process takes one of them for a moment.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import chain, islice
from os import register_at_fork
from threading import Barrier
from typing import TypeVar

import numpy as np
import torch

SMALLEST = 256
"""Tokens of a batch, below which cores share it after all."""

Part = TypeVar("Part")
Found = TypeVar("Found")


def even(lengths: np.ndarray, budget: int, lanes: int) -> int:
    """A token budget that gives every lane about as much to do.

    Args:
        lengths: Tokens of each sequence, shape [sequences].
        budget: Most tokens of a batch.
        lanes: How many batches go side by side.

    Returns:
        At most `budget`, and room for the longest sequence where `budget` has it.
    """
    total = int(lengths.sum())
    parts = lanes * -(-total // (lanes * budget))
    if lanes < 2 or not parts:
        return budget
    return min(budget, max(SMALLEST, -(-total // parts) + int(lengths.max())))


def side_by_side(
    work: Callable[[Part], Found], parts: Iterable[Part], lanes: int
) -> Iterator[Found]:
    """What `work` makes of each part, in order.

    Args:
        work: Runs in other threads, each with one core; what torch keeps for each thread, such as
            inference mode and autocast, is for it to enter.
        parts: Taken as they are needed. A single one is worked on here, by all cores.
        lanes: How many at a time.
    """
    parts = iter(parts)
    first = list(islice(parts, 2))
    if lanes < 2 or len(first) < 2:
        yield from map(work, chain(first, parts))
        return
    pool, going = _pool(lanes), deque[Future[Found]]()
    try:
        for part in chain(first, parts):
            going.append(pool.submit(work, part))
            if len(going) > lanes:
                yield going.popleft().result()
        while going:
            yield going.popleft().result()
    finally:
        wait(going)


@cache
def _pool(lanes: int) -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    pool, started = ThreadPoolExecutor(lanes, "lane"), Barrier(lanes + 1)

    def begin() -> None:
        use_cores(1)
        started.wait()

    for _ in range(lanes):
        pool.submit(begin)
    started.wait()
    torch.set_num_threads(threads)
    return pool


def use_cores(count: int) -> None:
    """Gives this thread's products so many cores, and those of threads that begin later."""
    torch.get_num_threads()  # a thread that never asked would take the others' number later
    torch.set_num_threads(count)


# A child has the pool and none of its threads.
register_at_fork(after_in_child=_pool.cache_clear)
