"""`scout report` on real jobs: a flipped bit, a slow rank and a hang, over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_hangs import ddp_job
from tests.support.hangs import FAULTY_STEP, STALL
from tests.support.ranks import run_ranks
from tests.support.replayed_job import checked_training
from torchscout.faults.plan import FaultPlan
from torchscout.report.document import documented
from torchscout.report.page import page


def reported(run_dir: Path) -> dict[str, Any]:
    document = documented(run_dir)
    assert document["problems"] == []
    page(document)
    return document


@pytest.mark.long
def test_a_flipped_bit_and_a_slow_rank(tmp_path: Path):
    faults = FaultPlan()
    for layer in (0, 1):
        at = f"stack.{layer}/forward"
        faults = faults.delay(rank=2, at=at, step=range(4, 10), seconds=0.25, calls=None)
    faults = faults.flip_bit(rank=1, at="head/bias", step=8, bit=20)
    found = run_ranks(checked_training, 4, faults, 8, [], tmp_path, timeout=120)
    assert found[1].fired
    document = reported(tmp_path)
    slow, corrupt = document["incidents"]
    assert (slow["manifestation"], slow["ranks"], corrupt["manifestation"], corrupt["ranks"]) == (
        "straggler",
        [[2, 2]],
        "sdc",
        [[1, 1]],
    )
    assert document["ranks"]["axes"] == {"replica": [0, 1, 2, 3]}
    assert "(replica 1)" in corrupt["where"][0]
    assert {vote["named"]: vote["ranks"] for vote in corrupt["records"][0]["votes"]} == {
        True: [[1, 1]],
        False: [[0, 0], [2, 3]],
    }
    assert all(each["is_decided"] for each in document["incidents"])
    (strip,) = [each for each in document["strips"] if each["surface"] == "time/module"]
    # A busy machine may delay another rank in a single round.
    assert any(first <= 2 <= last for first, last in strip["slow"])
    assert [point[1] for point in document["trust"]] == [*range(1, 9)], "a point for each check"
    assert document["trust"][-1][5] == 8, "corruption was found at step 8"
    assert document["trust"][-2][5] is None
    covered = {row["name"] for row in document["coverage"]}
    assert {"stack.0", "stack.1", "state/parameters"} <= covered


@pytest.mark.long
def test_a_late_rank(tmp_path: Path):
    faults = FaultPlan().stall(rank=2, at="step", step=FAULTY_STEP, seconds=STALL)
    results = run_ranks(ddp_job, 4, tmp_path, faults, timeout=90)
    assert [fired for fired, _ in results] == [0, 0, 1, 0]
    document = reported(tmp_path)
    (late,) = document["incidents"]
    assert (late["manifestation"], late["ranks"], late["state"]) == ("hang", [[2, 2]], "resolved")
    (wait, *_) = late["waits"]
    assert (wait["inside"], wait["missing"]) == ([[0, 1], [3, 3]], [[2, 2]])
    assert any(each["named"] and each["ranks"] == [[2, 2]] for each in late["stacks"])
    kinds = [event["kind"] for event in document["timeline"]]
    assert kinds[0] == "start"
    assert sorted(kinds[1:]) == ["decision", "end", "incident"]


def test_a_healthy_job(tmp_path: Path):
    run_ranks(checked_training, 3, FaultPlan(), 4, [], tmp_path, timeout=120)
    document = reported(tmp_path)
    assert document["incidents"] == []
    assert not any(row["findings"] for row in document["coverage"] if row["manifestation"] == "sdc")
    assert document["trust"][-1][5] is None
    assert not document["keeps_checkpoints"]
