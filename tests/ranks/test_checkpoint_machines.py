"""Machines that are lost with all they held, replaced by blank ones; no file system is shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Plan, Result, reached, train
from tests.support.machines import Machine, machines, why_impossible
from tests.support.ranks import run_ranks
from tests.support.spread_checkpoints import spread
from torchscout.checkpoint.gate import TrustLevel

pytestmark = pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))

# Each machine has a shared-memory file system of its own: the checkpoints' files lie there, too.
PLAN = Plan("ddp", 12, directory=Path("/dev/shm/disk"), memory=Path("/dev/shm/memory"), timeout_seconds=20.0)


def killed(hosts: Sequence[Machine], plan: Plan, folder: Path, step: int) -> list[dict[int, str]]:
    """A job that is killed in this step, when the latest checkpoint has its copies: each rank's states."""
    ranks = range(len(hosts))
    killed = replace(plan, killed=dict.fromkeys(ranks, step), when_copied=True, run_dir=folder)
    assert spread(hosts, killed, folder / "life") == ["killed"] * len(hosts), "see its output"
    return [reached(killed, rank) for rank in ranks]


def went_on(
    hosts: Sequence[Machine], plan: Plan, folder: Path, before: list[dict[int, str]]
) -> list[str | None]:
    """The job goes on from step 8 with the state it had then; where each rank got it from."""
    plan = replace(plan, run_dir=folder)
    sources = []
    for rank, each in enumerate(spread(hosts, plan, folder / "life")):
        assert isinstance(each, Result), each
        assert each.resumed is not None
        assert (each.resumed.step, each.resumed.role) == (8, TrustLevel.VERIFIED)
        assert reached(plan, rank)[8] == before[rank][8], "bitwise"
        assert each.failures == []
        sources.append(each.resumed.source)
    return sources


def run_dir(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def names(count: int) -> dict[str, list[str]]:
    return {f"m{number}": ["127.0.0.1 localhost"] for number in range(count)}


@pytest.mark.slow
def test_a_blank_machine_gets_its_state_from_a_peer(tmp_path: Path):
    with machines(tmp_path, names(3)) as (one, two, three):
        before = killed((one, two), PLAN, run_dir(tmp_path, "first"), 9)
        two.kill()
        again = run_dir(tmp_path, "again")
        assert went_on((one, three), PLAN, again, before) == ["its own memory", "rank 0's memory"]
    alone = run_ranks(train, 2, replace(PLAN, directory=None), timeout=60)
    for rank in (0, 1):
        assert reached(replace(PLAN, run_dir=again), rank)[12] == alone[rank].bits[12]


@pytest.mark.slow
def test_loaded_state_is_copied_again_before_anything_new_is_captured(tmp_path: Path):
    with machines(tmp_path, names(5)) as (one, two, three, four, five):
        before = killed((one, two, three), PLAN, run_dir(tmp_path, "first"), 9)
        two.kill()
        # No check is due before this one is killed, too.
        killed((one, four, three), replace(PLAN, interval=100), run_dir(tmp_path, "second"), 10)
        one.kill()
        sources = went_on((five, four, three), replace(PLAN, steps=10), run_dir(tmp_path, "third"), before)
        assert sources == ["rank 1's memory", "its own memory", "its own memory"]
