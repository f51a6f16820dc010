"""The paper's own example of algorithm 3: a catalog of two recipes, one checked after every step.

Two accepted checks make a candidate, two more promote it, and what recovery takes is what was promoted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.checkpoint_jobs import Plan, train
from tests.support.ranks import run_ranks
from torchscout.checkpoint.gate import TrustLevel
from torchscout.faults.plan import FaultPlan

RANKS = 2


def planned(tmp_path: Path) -> Plan:
    return Plan(
        "ddp",
        7,
        interval=1,
        recipes=2,
        candidates_written=True,  # what is not in files by the end of its second cycle waits for a third
        directory=tmp_path / "checkpoints",
        memory=tmp_path / "memory",
        run_dir=tmp_path / "run",
    )


def corrupted(step: int) -> FaultPlan:
    return FaultPlan().flip_bit(rank=1, at="stack.0.up/weight", step=step, bit=28)


def test_the_candidate_of_step_2_is_promoted_at_4_and_recovered_after_corruption_at_5(tmp_path: Path):
    plan = planned(tmp_path)
    for each in run_ranks(train, RANKS, replace(plan, faults=corrupted(5)), timeout=60):
        assert (each.unfired, each.incidents[0]) == (0, ("sdc", 5))
        assert each.roles == {  # latest, candidate, verified
            1: (None, None, None),  # what is captured at a check is known to be sealed at the next
            2: (1, None, None),
            3: (2, 2, None),
            4: (3, None, 2),
            5: (None, None, 2),
            6: (None, None, 2),
            7: (None, None, 2),
        }
    again = run_ranks(train, RANKS, replace(plan, run_dir=tmp_path / "again"), timeout=60)
    alone = run_ranks(train, RANKS, replace(plan, directory=None, candidates_written=False), timeout=60)
    for each, healthy in zip(again, alone, strict=True):
        assert each.resumed is not None
        assert (each.resumed.step, each.resumed.role) == (2, TrustLevel.VERIFIED)
        assert "corruption was found" in each.resumed.reason
        assert each.bits == {step: healthy.bits[step] for step in range(3, 8)}, "bitwise"
        # The count starts again: 4 is the next candidate, which two more checks promote.
        assert [each.roles[step] for step in (4, 5, 6, 7)] == [
            (3, None, 2),
            (4, 4, 2),
            (5, None, 4),
            (6, 6, 4),
        ]
