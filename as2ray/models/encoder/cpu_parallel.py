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

MIN_PARALLEL_TOKENS = 256
"""Tokens of a batch, below which cores share it after all."""

Item = TypeVar("Part")
Result = TypeVar("Found")


def balanced_budget(lengths: np.ndarray, token_budget: int, num_threads: int) -> int:
    """A token budget that gives every lane about as much to do.

    Args:
        lengths: Tokens of each sequence, shape [sequences].
        budget: Most tokens of a batch.
        lanes: How many batches go side by side.

    Returns:
        At most `budget`, and room for the longest sequence where `budget` has it.
    """
    total = int(lengths.sum())
    parts = num_threads * -(-total // (num_threads * token_budget))
    if num_threads < 2 or not parts:
        return token_budget
    return min(token_budget, max(MIN_PARALLEL_TOKENS, -(-total // parts) + int(lengths.max())))


def parallel_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Iterator[Result]:
    """What `work` makes of each part, in order.

    Args:
        work: Runs in other threads, each with one core; what torch keeps for each thread, such as
            inference mode and autocast, is for it to enter.
        parts: Taken as they are needed. A single one is worked on here, by all cores.
        lanes: How many at a time.
    """
    items = iter(items)
    first = list(islice(items, 2))
    if num_threads < 2 or len(first) < 2:
        yield from map(function, chain(first, items))
        return
    pool, going = _thread_pool(num_threads), deque[Future[Result]]()
    try:
        for part in chain(first, items):
            going.append(pool.submit(function, part))
            if len(going) > num_threads:
                yield going.popleft().result()
        while going:
            yield going.popleft().result()
    finally:
        wait(going)


@cache
def _thread_pool(num_threads: int) -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    pool, started = ThreadPoolExecutor(num_threads, "lane"), Barrier(num_threads + 1)

    def begin() -> None:
        set_num_threads(1)
        started.wait()

    for _ in range(num_threads):
        pool.submit(begin)
    started.wait()
    torch.set_num_threads(threads)
    return pool


def set_num_threads(num_threads: int) -> None:
    """Gives this thread's products so many cores, and those of threads that begin later."""
    torch.get_num_threads()  # a thread that never asked would take the others' number later
    torch.set_num_threads(num_threads)


# A child has the pool and none of its threads.
register_at_fork(after_in_child=_thread_pool.cache_clear)
