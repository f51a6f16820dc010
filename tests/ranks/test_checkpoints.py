"""Jobs that are killed in the middle of a step and go on from their checkpoints: bitwise as if never killed.

Sums over three or more Gloo ranks depend on the order in which DDP and FSDP happen to add them up, and DDP
orders its buckets anew in each process's second step. That is PyTorch's own; so every sum here is over two.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Plan, Result, reached, train
from tests.support.ranks import RankError, run_ranks
from torchscout.checkpoint.gate import SweepResult, TrustLevel

RANKS = 2


def on_ranks(plan: Plan) -> list[Result]:
    return run_ranks(train, RANKS, plan, timeout=180)


def planned(tmp_path: Path, kind: str, steps: int = 8) -> Plan:
    return Plan(
        kind,
        steps,
        directory=tmp_path / "checkpoints",
        run_dir=tmp_path / "run",
        memory=tmp_path / "memory",
    )


def killed(plan: Plan, step: int) -> None:
    """All ranks, in the middle of that step."""
    ranks = range(RANKS)
    with pytest.raises(RankError) as raised:
        on_ranks(replace(plan, killed=dict.fromkeys(ranks, step)))
    assert str(raised.value).count("exit code -9") == len(ranks), raised.value
    assert all(max(reached(plan, rank)) == step - 1 for rank in ranks)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_killed_job_that_goes_on_ends_bitwise_as_one_that_was_not(tmp_path: Path, kind: str):
    plan = replace(planned(tmp_path, kind), interval=1)
    alone = on_ranks(replace(plan, directory=None))
    killed(plan, 6)
    before = [reached(plan, rank) for rank in range(RANKS)]
    results = on_ranks(plan)
    for rank, (mine, theirs) in enumerate(zip(results, alone, strict=True)):
        assert mine.resumed is not None
        # The capture of step 5 may have been under way.
        assert (mine.resumed.step, mine.resumed.role) in (
            (4, TrustLevel.VERIFIED),
            (5, TrustLevel.VERIFIED),
        ), mine
        assert mine.resumed.source == "its own memory"
        # By then all layers have been replayed, and their calls kept.
        assert (mine.resumed.swept, mine.resumed.unswept) == (SweepResult.CLEAN, None), mine
        assert list(mine.bits) == list(range(mine.resumed.step + 1, 9))
        for step, bits in [*list(before[rank].items())[1:], *mine.bits.items()]:
            assert bits == theirs.bits[step], f"rank {rank} differs after step {step}"
        assert mine.failures == mine.status["problems"] == mine.incidents == []
    assert len({mine.resumed.step for mine in results if mine.resumed}) == 1


def test_training_that_keeps_checkpoints_is_bitwise_training_that_does_not(tmp_path: Path):
    plan = replace(planned(tmp_path, "ddp", 12), interval=1)
    alone = on_ranks(replace(plan, directory=None))
    results = on_ranks(plan)
    assert [each.bits for each in results] == [each.bits for each in alone]
    for each in results:
        assert each.status["latest"] == each.status["verified"] == 11, "12 is still being sealed"
        assert each.status["durable"], "files were written meanwhile"
        assert each.failures == each.status["problems"] == []


def test_a_restarted_job_may_switch_between_cycles_and_dense_checks(tmp_path: Path):
    plan = replace(planned(tmp_path, "ddp", steps=6), interval=1, recipes=2)
    on_ranks(plan)
    dense = on_ranks(replace(plan, recipes=None, steps=8))
    assert [(each.status["verified"], each.status["capturing"]) for each in dense] == [(7, 8), (7, 8)]
    for each in on_ranks(replace(plan, recipes=3, steps=9)):
        assert each.resumed is not None
        assert (each.resumed.step, each.status["verified"], each.status["latest"]) == (8, 8, 8)
