"""Computes items in a thread of its own while the caller uses those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

__all__ = ["ahead"]

T = TypeVar("T")
_END: Final = object()


def ahead(items: Iterator[T], most: int) -> Generator[T, None, None]:
    """Yield these items, of which a thread computes up to ``most`` while the caller uses one.

    An error of the thread is raised here. Closing the iterator waits for the item in progress.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="torchscout-ahead")
    try:
        coming = deque(pool.submit(next, items, _END) for _ in range(most + 1))
        while (item := coming.popleft().result()) is not _END:
            yield item  # type: ignore[misc]
            coming.append(pool.submit(next, items, _END))
    finally:
        pool.shutdown(cancel_futures=True)
