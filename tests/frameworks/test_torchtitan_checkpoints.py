"""What was kept of a job of TorchTitan's comes back bitwise: after a kill, and from before a wrong number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import titan_layouts
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.titan_jobs import Outcome, Trial, answering, train
from tests.support.titan_layouts import Layout, layouts, live
from torchscout.faults.plan import FaultPlan

__all__ = ["answering"]

assets = titan_layouts.assets
slow = pytest.mark.slow
FAULTY_STEP = 2
"""In which the faulty layer is checked: there is one a step, of each kind."""


def overridden(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "replay": {"interval": 1},
        "observer": None,
        "checkpoint": {"directory": str(folder / "kept" / "files")},
        "run_dir": str(folder / "scout"),
        **changes,
    }


def all_killed(ranks: int, step: int) -> FaultPlan:
    faults = FaultPlan()
    for rank in range(ranks):
        faults = faults.kill(rank=rank, at="step", step=step)
    return faults


def is_as_if_nothing_had_been(alone: list[Outcome], resumed: list[Outcome]) -> None:
    for before, after in zip(alone, resumed, strict=True):
        assert after.failures == []
        assert after.progress == before.progress
        assert after.bits == before.bits


@layouts()
def test_a_killed_job_goes_on_bitwise_through_the_override(
    request: pytest.FixtureRequest, layout: Layout, assets: Path, tmp_path: Path
):
    """With gradient accumulation and two kinds of optimizers; schedule, data position and random streams
    come back too."""
    trial = layout.trial(assets, accumulation=2, kinds=True)
    kept = replace(trial, overridden=overridden(tmp_path), directory=tmp_path / "kept")
    killed = replace(kept, faults=all_killed(layout.ranks, 5))
    with pytest.raises(RankError):
        run_ranks(train, layout.ranks, killed, tmp_path / "scout", timeout=300)
    ranks = live(request, layout)
    alone, resumed = ranks.ask((trial, None), 300), ranks.ask((kept, tmp_path / "scout"), 300)
    assert all(3 <= each.resumed <= 4 for each in resumed)
    is_as_if_nothing_had_been(alone, resumed)


@layouts()
def test_after_a_wrong_number_a_job_goes_on_from_before_it(
    request: pytest.FixtureRequest, layout: Layout, assets: Path, tmp_path: Path
):
    """Training has it too, and so have all later steps of that run."""
    faults = FaultPlan().flip_bit(
        rank=2, at=f"{layout.layer}/output", step=FAULTY_STEP, bit=20, calls=range(layout.called + 200)
    )
    trial, ranks = layout.trial(assets, steps=5), live(request, layout)
    kept = replace(trial, directory=tmp_path / "kept")
    alone = ranks.ask((trial, None), 300)
    spoiled = ranks.ask((replace(kept, faults=faults), tmp_path / "scout"), 300)
    assert spoiled[0].found == {("sdc", *layout.found)}, [each.sentence for each in spoiled[0].incidents]
    assert all(one.bits != other.bits for one, other in zip(alone, spoiled, strict=True))
    resumed = ranks.ask((kept, tmp_path / "scout"), 300)
    assert {each.resumed for each in resumed} == {FAULTY_STEP - 1}
    is_as_if_nothing_had_been(alone, resumed)


@slow
@pytest.mark.parametrize("both", [False, True], ids=["alone", "both"])
def test_checkpoints_of_torchtitans_own_go_on_working(
    four: LiveRanks, both: bool, assets: Path, tmp_path: Path
):
    """They have step 3, and no random streams; what SCOUT kept is of a later step, and wins."""
    settings = overridden(tmp_path) if both else overridden(tmp_path, checkpoint=None)
    trial = Trial(assets, own=tmp_path / "own", overridden=settings, directory=tmp_path / "kept")
    with pytest.raises(RankError):
        run_ranks(train, 4, replace(trial, faults=all_killed(4, 6)), tmp_path / "scout", timeout=300)
    assert (tmp_path / "own" / "checkpoint" / "step-3").is_dir()
    alone, resumed = four.ask((Trial(assets), None), 300), four.ask((trial, tmp_path / "scout"), 300)
    for before, after in zip(alone, resumed, strict=True):
        assert after.failures == []
        assert (after.resumed >= 4) is both
        assert after.status["step"] == 6
        assert {**after.bits, "random": ""} == {**before.bits, "random": ""}
        assert after.progress == before.progress
