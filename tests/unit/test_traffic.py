"""Plans of AllToAll traffic."""

from __future__ import annotations

import pytest
import torch

from torchscout.replay.recipes.all_to_all import BYTES, FEW_BYTES, PLANS, ROWS, Plan, _scratch, _width


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


@pytest.mark.parametrize("members", [2, 3, 8, 64])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("size", [BYTES["cuda"], FEW_BYTES])
def test_the_busiest_member_moves_enough_to_show_bandwidth_and_no_more(name: str, members: int, size: int):
    plan = PLANS[name](members, ROWS * members)
    width = _width(plan, size // 4)
    busiest = 4 * width * max(*map(sum, plan), *received(plan))
    assert size / 2 < busiest <= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_scratch_data_depend_on_place_and_offset(dtype: torch.dtype):
    first, second = (_scratch(place, 1001, dtype, torch.device("cpu")) for place in (0, 1))
    assert (first.dtype, first.numel()) == (dtype, 1001)
    expected = [(offset * 197 + 89 + 1) & 0xFF for offset in range(1001 * dtype.itemsize)]
    assert second.view(torch.uint8).tolist() == expected
    assert not (first.view(torch.uint8) == second.view(torch.uint8)).any()
    assert _scratch(0, 0, dtype, torch.device("cpu")).numel() == 0
