"""Which uses of process groups all their members agree about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torchscout.replay.recipes.process_groups import SEND, GroupUse, agreed

ALL = GroupUse("all_reduce", (0, 1, 2, 3), "default")
LEFT, RIGHT = GroupUse("all_gather", (0, 1), "3"), GroupUse("all_gather", (2, 3), "4")


def described(*logged: Sequence[GroupUse]) -> list[Any]:
    """Each rank's description, as it arrives."""
    return [json.loads(json.dumps([use.describe() for use in uses])) for uses in logged]


def test_uses_logged_by_all_members_are_agreed_on_in_one_order():
    sent = described([ALL, LEFT], [LEFT, ALL], [RIGHT, ALL], [ALL, RIGHT])
    assert agreed([ALL, LEFT], sent) == agreed([LEFT, ALL], sent) == [LEFT, ALL]
    assert agreed([ALL, RIGHT], sent) == [RIGHT, ALL]


def test_a_use_that_one_member_did_not_log_is_left_out_by_all():
    sent = described([ALL, LEFT], [LEFT], [RIGHT, ALL], [ALL, RIGHT])
    assert agreed([ALL, LEFT], sent) == [LEFT]
    assert agreed([ALL, RIGHT], sent) == [RIGHT]


def test_groups_with_the_same_members_are_separate():
    twin = ALL._replace(group="twin")
    gathered = ALL._replace(operation="all_gather")
    uses = [twin, gathered, ALL]
    assert agreed(uses, described(*[uses] * 4)) == [gathered, ALL, twin]
    assert agreed([ALL, twin], described([ALL, twin], [twin], [twin], [twin, ALL])) == [twin]


def test_sends_are_distinguished_by_both_ends():
    chain = [GroupUse(SEND, ends, "world") for ends in ((0, 1), (0, 2), (1, 2))]
    sent = described([chain[0], chain[1]], [chain[0]], [chain[1], chain[2]], [])
    assert agreed([chain[0], chain[1]], sent) == [chain[0], chain[1]]
    assert agreed([chain[1], chain[2]], sent) == [chain[1]]  # rank 1 has not logged the last one


def test_groups_of_one_name_with_different_members_are_separate():
    sent = described([LEFT], [LEFT], [LEFT._replace(members=(2, 3))], [])
    assert agreed([LEFT], sent) == [LEFT]
    assert agreed([LEFT._replace(members=(2, 3))], sent) == []
