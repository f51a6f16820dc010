"""Exchanges over a tree of groups: what every rank receives, how much is sent, and what a failure does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.thread_peers import on_threads, tree_of_threads
from torchscout.c3 import tree
from torchscout.c3.tree import FAN_OUT, Runs, TreeChannel, groups_of, height_of
from torchscout.errors import ChannelError


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three members in each group above the lowest: few ranks make a high tree."""
    monkeypatch.setattr(tree, "FAN_OUT", 3)


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 64, 300, 16_384, 131_072])
@pytest.mark.parametrize("width", [2, 8, 16])
def test_every_rank_is_below_the_first_one(size: int, width: int):
    for rank in {0, 1, size // 2, size - 1, *range(0, size, max(1, size // 7))} - {size}:
        groups = groups_of(rank, size, width)
        assert all(rank in group and len(group) <= max(width, FAN_OUT) for group in groups)
        # A rank that is not the first of its group leaves the rest to the one that is.
        assert [group[0] == rank for group in groups[:-1]] == [True] * (len(groups) - 1)
        above = groups[-1][0]
        assert above == 0 or above < rank
    assert height_of(131_072, 8) == 5


def test_a_job_of_one_group_has_no_levels_above():
    assert groups_of(5, 16, 16) == [range(16)]


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_receive_all_payloads(seed: int, narrow: None):
    chance = random.Random(seed)
    size, width = chance.randrange(1, 30), chance.choice([2, 3, 5])
    payloads = [chance.choice([b"", b"same", b"same", bytes([rank]) * rank * 500]) for rank in range(size)]
    source = chance.randrange(size)

    def answering(runs: list[Runs]) -> bytes:
        assert runs[1].counts.tolist() == [size]
        return b"|".join(runs[0].by_rank())

    def body(end: TreeChannel) -> tuple[object, ...]:
        return (
            end.gather(payloads[end.position]),
            end.highest([end.position, -end.position]),
            end.broadcast(payloads[end.position], source=source),
            end.consult([payloads[end.position], b"all"], answering),
        )

    expected = (payloads, [size - 1, 0], payloads[source], b"|".join(payloads))
    assert on_threads(tree_of_threads(size, width), body) == [expected] * size


def test_equal_payloads_travel_once():
    runs = Runs.joined([Runs.of(b"x" * 1000)] * 40 + [Runs.of(b"other")] + [Runs.of(b"x" * 1000)] * 59)
    assert runs.counts.tolist() == [40, 1, 59]
    assert len(runs.encode()) < 2100
    again = Runs.decode(runs.encode()).by_rank()
    assert [len(each) for each in again] == [1000] * 40 + [5] + [1000] * 59
    assert len({id(each) for each in again}) == 3


def test_another_format_is_refused():
    with pytest.raises(ChannelError, match="sent evidence in format 9, but this one uses 1"):
        Runs.decode(b"\x09" + Runs.of(b"x").encode()[1:])


class Broken:
    """A channel whose exchanges fail on this rank."""

    def highest(self, _: Sequence[int]) -> list[int]:
        raise ChannelError("the connection to the ranks above is lost")


def failing(end: TreeChannel, ends: Sequence[TreeChannel]) -> str:
    if end.position == 3:
        ends[3]._levels[1] = Broken()  # type: ignore[index]
    try:
        end.highest([1])
    except ChannelError as error:
        return str(error)
    return "agreed"


def test_ranks_below_a_failure_receive_it(narrow: None):
    """Ranks 4 and 5 are below rank 3. Their own channels wait ten seconds; the failure arrives at once."""
    ends = tree_of_threads(9, 3, timeout=5.0)
    found = on_threads(ends, lambda end: failing(end, ends))
    assert found[3:6] == ["the connection to the ranks above is lost"] * 3
    assert "agreed" not in found  # all ranks or none
