"""Computes items in a thread of its own while the caller uses those before."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["ahead"]

T = TypeVar("T")


def ahead(items: Iterable[T], most: int) -> Generator[T, None, None]:
    """Yield these items, of which a thread computes up to ``most`` before they are asked for.

    At most ``most`` + 2 items are in use at a time: one that the caller has, those that wait, and one that is
    computed. An error of the thread is raised here. Closing the iterator waits for the item in progress.
    """
    room = threading.Semaphore(most + 1)
    computed: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    stopped = False

    def compute() -> None:
        try:
            for item in items:
                computed.put((item,))
                room.acquire()
                if stopped:
                    return
            computed.put(None)
        except BaseException as error:  # noqa: BLE001
            computed.put(error)

    thread = threading.Thread(target=compute, name="torchscout-ahead", daemon=True)
    thread.start()
    try:
        while (found := computed.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found[0]
            room.release()
    finally:
        stopped = True
        room.release()
        thread.join()
