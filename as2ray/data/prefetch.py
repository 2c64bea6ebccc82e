"""Prepares packed batches in another thread, while a GPU works on those before."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterable[Item], num_ahead: int = 2) -> Iterator[Item]:
    """Yields items in order, of which another thread prepares the next ones.

    Args:
        items: What to yield. An error in it is raised where its item would be.
        num_ahead: Number of items that are prepared before they are asked for.
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(1, "prefetch") as pool:
        futures = deque(pool.submit(next, iterator, end) for _ in range(num_ahead))
        while (item := futures.popleft().result()) is not end:
            futures.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
