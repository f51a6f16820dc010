"""Plans of AllToAll traffic."""

from __future__ import annotations

import pytest

from torchscout.replay.recipes.all_to_all import PLANS, Plan


@pytest.mark.parametrize("members", [2, 3, 4, 8, 33])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_for_every_pair_what_is_sent(name: str, members: int):
    plan = PLANS[name](members, 64)
    assert len(plan) == members
    assert all(len(row) == members for row in plan)
    assert all(count >= 0 for row in plan for count in row)
    assert sum(map(sum, plan)) > 0


def received(plan: Plan) -> list[int]:
    return [sum(column) for column in zip(*plan, strict=True)]


def test_plans_differ_in_what_they_exercise():
    plans = {name: make(4, 64) for name, make in PLANS.items()}
    assert received(plans["balanced"]) == [64] * 4
    assert [row.count(0) for row in plans["shifted"]] == [3] * 4, "all goes to one other place"
    assert all(row[place] == 0 for place, row in enumerate(plans["shifted"]))
    assert [row.index(64) for row in plans["reversed"]] == [3, 2, 1, 0]
    skewed = received(plans["skewed"])
    assert skewed == sorted(skewed, reverse=True)
    assert skewed[0] > 4 * skewed[-1] > 0
    assert received(plans["sparse"])[1::2] == [0, 0], "some receive nothing"
