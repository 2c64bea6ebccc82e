"""Runs several packed batches at the same time on a CPU, each in a thread with one core.

The operations of a small encoder are too short to be divided among cores: after each operation the
cores wait for one another, even longer if another process takes one of them for a moment.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import chain, islice
from os import register_at_fork
from threading import Barrier, local
from typing import TypeVar

import numpy as np
import torch

MIN_PARALLEL_TOKENS = 256
"""Smaller batches are not worth splitting among threads."""

REPRODUCIBLE_THREADS = 16
"""Threads that batches are divided among if scores must not depend on the number of threads."""

_THREAD = local()
"""Has `is_worker` in the threads of the pools."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def balanced_budget(lengths: np.ndarray, token_budget: int, num_threads: int) -> int:
    """Returns a token budget that divides sequences evenly among threads.

    Args:
        lengths: Number of tokens of each sequence, shape [sequences].
        token_budget: Maximum number of tokens of a batch.
        num_threads: Number of batches that run at the same time.

    Returns:
        At most `token_budget`. The longest sequence fits if it fits `token_budget`.
    """
    num_tokens = int(lengths.sum())
    num_batches = num_threads * -(-num_tokens // (num_threads * token_budget))
    if num_threads < 2 or not num_batches:
        return token_budget
    balanced = -(-num_tokens // num_batches) + int(lengths.max())
    return min(token_budget, max(MIN_PARALLEL_TOKENS, balanced))


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_threads: int,
    one_core_each: bool = False,
) -> Iterator[Result]:
    """Yields the function's result for each item, in order.

    Args:
        function: Runs in other threads, each with one core. It must enter what torch keeps for each
            thread, such as inference mode and autocast. If it calls `parallel_map` itself, the
            inner items are processed one after the other, in its thread.
        items: Taken as they are needed. A single item is processed in this thread, with all cores.
        num_threads: Number of items that are processed at the same time.
        one_core_each: Whether a single item, too, is processed with one core.
    """
    items = iter(items)
    first_items = list(islice(items, 2))
    is_inner = getattr(_THREAD, "is_worker", False)
    if is_inner or (not one_core_each and (num_threads < 2 or len(first_items) < 2)):
        yield from map(function, chain(first_items, items))
        return
    pool, futures = _thread_pool(num_threads), deque[Future[Result]]()
    try:
        for item in chain(first_items, items):
            futures.append(pool.submit(function, item))
            if len(futures) > num_threads:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        wait(futures)


@cache
def _thread_pool(num_threads: int) -> ThreadPoolExecutor:
    previous_num_threads = torch.get_num_threads()
    pool, all_started = ThreadPoolExecutor(num_threads, "rank"), Barrier(num_threads + 1)

    def initialize() -> None:
        _THREAD.is_worker = True
        set_num_threads(1)
        all_started.wait()

    for _ in range(num_threads):
        pool.submit(initialize)
    all_started.wait()
    torch.set_num_threads(previous_num_threads)
    return pool


def set_num_threads(num_threads: int) -> None:
    """Sets the number of cores of this thread's products, and of threads that start later."""
    torch.get_num_threads()  # initializes the thread; otherwise it would take a later global value
    torch.set_num_threads(num_threads)


# A forked child inherits the pool object without its threads.
register_at_fork(after_in_child=_thread_pool.cache_clear)
