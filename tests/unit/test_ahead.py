"""Items that a thread computes while others are used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.small_job import until
from torchscout.checkpoint.replication.streams import ahead


def counted(seen: list[int], most: int = 100) -> Iterator[int]:
    for number in range(most):
        seen.append(number)
        yield number


def alive() -> int:
    return sum(each.name.startswith("torchscout-ahead") for each in threading.enumerate())


@pytest.mark.parametrize("most", [1, 3])
def test_all_come_in_order(most: int):
    assert [*ahead(counted([]), most)] == [*range(100)]
    assert not alive()


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_than_so_many_are_in_use(most: int):
    seen: list[int] = []
    items = ahead(counted(seen), most)
    for number in range(10):
        assert next(items) == number
        until(lambda number=number: len(seen) == number + 1 + most, "the thread is ahead")
    items.close()
    assert len(seen) == 10 + most
    assert not alive()


def test_an_error_is_raised_after_the_items_before_it():
    def failing() -> Iterator[int]:
        yield from range(3)
        raise ConnectionError("gone")

    items = ahead(failing(), 1)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConnectionError, match="gone"):
        next(items)
    assert not alive()


def test_a_caller_that_fails_ends_the_thread():
    with pytest.raises(ZeroDivisionError):
        sum(1 // each for each in ahead(counted([]), 1))
    assert not alive()
