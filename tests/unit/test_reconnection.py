"""Ranks agree through a store on the step at which they reconnect: all of them or none."""

from __future__ import annotations

import datetime
import itertools

import pytest
import torch.distributed as dist

from torchscout.errors import ChannelError
from torchscout.session import reconnection as module
from torchscout.session.reconnection import Proposal, Reconnection
from torchscout.session.replay.recovery import steps_until


def gathered(size: int) -> list[Reconnection]:
    store = dist.HashStore()
    return [Reconnection(store, rank, size) for rank in range(size)]


def test_the_last_rank_that_leaves_proposes_the_step():
    ranks = gathered(3)
    for number, each in enumerate(ranks):
        assert [other.proposal() for other in ranks] == [None] * 3
        each.leave(f"failed in {number} ways", Proposal(10 * number, 1))
    assert [each.proposal() for each in ranks] == [Proposal(20, 1)] * 3
    assert {each.first_reason() for each in ranks} == {"rank 0: failed in 0 ways"}


def test_that_there_is_no_further_attempt_is_known_to_all():
    ranks = gathered(2)
    for each in ranks:
        each.leave("no", Proposal(None, 5))
    assert [each.proposal() for each in ranks] == [Proposal(None, 5)] * 2


def test_all_ranks_go_if_all_have_accepted():
    ranks = gathered(3)
    for each in ranks:
        each.accept(1)
    assert [each.is_go(1) for each in ranks] == [True] * 3


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_no_rank_goes_if_one_decides_before_all_have_accepted(order: tuple[int, ...]):
    ranks, (late, *others) = gathered(3), order
    for each in others:
        ranks[each].accept(1)
    first = ranks[others[0]].is_go(1)
    ranks[late].accept(1)  # it was not there in time
    assert [first, *(ranks[each].is_go(1) for each in order)] == [False] * 4
    for each in order:
        ranks[each].accept(2)
    assert [ranks[each].is_go(2) for each in order] == [True] * 3


def test_one_rank_reports():
    ranks = gathered(4)
    assert {each.reporter() for each in ranks[::-1]} == {3}


class Stopped:
    """A store whose process is stopped."""

    def clone(self) -> Stopped:
        return self

    def check(self, _: list[str]) -> bool:
        silent = dist.HashStore()
        silent.set_timeout(datetime.timedelta(seconds=1))
        return bool(silent.get("never"))


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.25)
    rank = Reconnection(Stopped(), 0, 1)
    with pytest.raises(ChannelError, match=r"did not answer within 0.25 s"):
        rank.proposal()


def test_a_store_that_fails_is_an_error_with_its_reason():
    with pytest.raises(ChannelError, match="the job's store failed"):
        Reconnection(Stopped(), 0, 1).proposal()


@pytest.mark.parametrize(("interval", "steps"), [(1, [4, 8, 16, 32]), (20, [20, 40, 80, 160])])
def test_each_attempt_waits_for_twice_as_many_steps(interval: int, steps: list[int]):
    assert [steps_until(attempt, interval) for attempt in (1, 2, 3, 4)] == steps
