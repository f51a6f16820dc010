"""Which of the links that training was heard on all their members agree about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torchscout.replay.recipes.process_groups import SEND, GroupUse, agreed

EVERYBODY = GroupUse("all_reduce", (0, 1, 2, 3), "default")
LEFT, RIGHT = GroupUse("all_gather", (0, 1), "3"), GroupUse("all_gather", (2, 3), "4")


def told(*heard: Sequence[GroupUse]) -> list[Any]:
    """What each rank tells, as it arrives."""
    return [json.loads(json.dumps([link.told() for link in links])) for links in heard]


def test_what_all_members_heard_is_agreed_on_in_one_order():
    said = told([EVERYBODY, LEFT], [LEFT, EVERYBODY], [RIGHT, EVERYBODY], [EVERYBODY, RIGHT])
    assert agreed([EVERYBODY, LEFT], said) == agreed([LEFT, EVERYBODY], said) == [LEFT, EVERYBODY]
    assert agreed([EVERYBODY, RIGHT], said) == [RIGHT, EVERYBODY]


def test_a_line_that_a_member_did_not_hear_is_left_out_by_all():
    said = told([EVERYBODY, LEFT], [LEFT], [RIGHT, EVERYBODY], [EVERYBODY, RIGHT])
    assert agreed([EVERYBODY, LEFT], said) == [LEFT]
    assert agreed([EVERYBODY, RIGHT], said) == [RIGHT]


def test_groups_with_the_same_members_are_each_for_themselves():
    twin = EVERYBODY._replace(group="twin")
    gathered = EVERYBODY._replace(operation="all_gather")
    links = [twin, gathered, EVERYBODY]
    assert agreed(links, told(*[links] * 4)) == [gathered, EVERYBODY, twin]
    assert agreed([EVERYBODY, twin], told([EVERYBODY, twin], [twin], [twin], [twin, EVERYBODY])) == [twin]


def test_neighbours_are_told_apart_by_both_ends():
    chain = [GroupUse(SEND, ends, "world") for ends in ((0, 1), (0, 2), (1, 2))]
    said = told([chain[0], chain[1]], [chain[0]], [chain[1], chain[2]], [])
    assert agreed([chain[0], chain[1]], said) == [chain[0], chain[1]]
    assert agreed([chain[1], chain[2]], said) == [chain[1]]  # rank 1 has not heard of the last one


def test_groups_of_one_name_with_other_members_are_not_one():
    said = told([LEFT], [LEFT], [LEFT._replace(members=(2, 3))], [])
    assert agreed([LEFT], said) == [LEFT]
    assert agreed([LEFT._replace(members=(2, 3))], said) == []
