"""Checkpoints of one layout that another one loads: the whole state is the same, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ranks import RankError, run_ranks
from tests.support.reshard_jobs import Job, Outcome, damage, train
from torchscout.checkpoint.gate import TrustLevel

STEPS = 3


def saved(tmp_path: Path, kind: str, ranks: int, **settings: bool) -> tuple[Job, list[Outcome]]:
    """What a job has saved at its end, and where."""
    job = Job(kind, STEPS, tmp_path, **settings)
    outcomes = run_ranks(train, ranks, job, timeout=120)
    assert not any(each.failures for each in outcomes)
    return job, outcomes


def resumed(job: Job, kind: str, ranks: int, steps: int = STEPS) -> list[Outcome]:
    return run_ranks(train, ranks, replace(job, kind=kind, steps=steps, layout="reshard"), timeout=120)


def assert_equal(found: list[Outcome], state: dict[str, torch.Tensor]) -> None:
    """Every rank has the same whole state, or of it what a rank of ZeRO has."""
    every: dict[str, torch.Tensor] = {}
    for each in found:
        every |= each.loaded
        for name, tensor in each.loaded.items():
            assert torch.equal(tensor, state[name]), name
    assert set(every) == set(state)


def whole(found: list[Outcome]) -> dict[str, torch.Tensor]:
    return {name: tensor for each in found for name, tensor in each.trained.items()}


@pytest.mark.long
def test_four_ranks_of_fsdp_become_two_and_then_a_plain_process(tmp_path: Path):
    job, before = saved(tmp_path, "fsdp", 4)
    two = resumed(job, "fsdp", 2, STEPS + 1)
    assert_equal(two, whole(before))
    for each in two:
        assert each.resumed is not None
        assert (each.resumed.step, each.resumed.role) == (STEPS, TrustLevel.VERIFIED)
        assert "4 ranks, shard 4" in str(each.resumed.resharded_from)
        assert each.resumed.not_restored == ("registered state 'loader'", "random state")
        assert "registered state 'schedule'" in each.resumed.restored
        assert "Not restored: registered state 'loader'" in each.resumed.reason
        assert each.values == (STEPS, 0), "a loader's position is that of another number of ranks"
        assert each.problems == each.failures == []
    (one,) = resumed(job, "plain", 1)
    assert_equal([one], whole(two))
    assert one.resumed is not None
    assert one.resumed.step == STEPS + 1
    assert "2 ranks, shard 2" in str(one.resumed.resharded_from)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "then", "now"),
    [
        ("ddp", 3, "ddp", 2),
        ("ddp", 2, "fsdp", 4),
        ("hsdp", 4, "fsdp", 4),
        ("fsdp", 2, "hsdp", 4),
        ("tp", 2, "plain", 1),
        ("plain", 1, "tp", 2),
        ("fsdp_tp", 4, "fsdp", 3),
        ("fsdp", 3, "fsdp_tp", 4),
        ("zero", 3, "zero", 2),
        ("zero", 2, "ddp", 2),
    ],
)
def test_other_layouts_load_the_same_state(tmp_path: Path, kind: str, ranks: int, then: str, now: int):
    job, before = saved(tmp_path, kind, ranks)
    after = resumed(job, then, now, STEPS + 2)
    assert_equal(after, whole(before))
    # What is trained after it is what this layout trains from the same state, up to rounding.
    straight = run_ranks(train, now, Job(then, STEPS + 2, tmp_path / "straight"), timeout=120)
    for name, tensor in whole(straight).items():
        assert torch.allclose(whole(after)[name], tensor, atol=1e-5), name
    again = resumed(job, then, now, STEPS + 2)
    assert [each.resumed.resharded_from for each in again if each.resumed] == [None] * now, "the same layout"
    assert_equal(again, whole(after))


def test_without_the_option_the_error_names_it_and_nothing_is_lost(tmp_path: Path):
    job, before = saved(tmp_path, "ddp", 2)
    with pytest.raises(RankError) as raised:
        run_ranks(train, 1, replace(job, kind="plain"), timeout=60)
    assert "world size 2, this job is of 1" in str(raised.value)
    assert 'session.resume(layout="reshard") loads them' in str(raised.value)
    assert_equal(resumed(job, "plain", 1), whole(before))


@pytest.mark.slow
def test_shards_that_only_other_machines_have_are_sent(tmp_path: Path):
    job, before = saved(tmp_path, "fsdp", 3, local_disks=True)
    assert_equal(resumed(job, "fsdp", 4), whole(before))


@pytest.mark.slow
def test_a_damaged_shard_is_named_and_the_generation_passed_over(tmp_path: Path):
    job, _ = saved(tmp_path, "fsdp", 3)
    for shard in tmp_path.rglob(f"step-{STEPS:010d}*/rank-2-of-3.held-by-*.shard"):
        damage(shard, "layers.0.0/weight.exp_avg")
    for each in resumed(job, "fsdp", 2):
        assert each.resumed is not None
        assert (each.resumed.step, each.resumed.role) == (STEPS - 1, TrustLevel.VERIFIED)
        assert f"step {STEPS} cannot be had" in each.resumed.reason
        assert "rank-2-of-3.held-by-2.shard" in each.resumed.reason
        assert "exp_avg' is damaged" in each.resumed.reason
