"""Replays under FSDP that fail, or that cannot be forgotten; healthy and faulty jobs are in the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from evaluation.jobs.job import Report, Trial
from tests.support.failing_job import FAILURES, Failing, train, with_failures
from tests.support.ranks import run_ranks
from torchscout.replay import fsdp_state

HAS_RESET = hasattr(FSDPModule, "reset_iter_state")
"""Whether this PyTorch has the public call, which came with 2.13."""
ON_ALL = [Failing((0, 1, 2), each.within) for each in FAILURES]


def as_before_reset() -> None:
    """Remove FSDP's public reset call in this rank's process, as before PyTorch 2.13."""
    if HAS_RESET:
        del FSDPModule.reset_iter_state


def failing(rank: int, name: str, has_reset: bool, run_dir: Path) -> list[tuple[bool, Report]]:
    if not has_reset:
        as_before_reset()
    return with_failures(rank, name, [*FAILURES, *ON_ALL], run_dir)


@pytest.mark.slow_except("no reset-fsdp2")
@pytest.mark.long_cases("no reset-fsdp2")
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-units", "fsdp2-checkpointing"])
@pytest.mark.parametrize(
    "has_reset",
    [
        pytest.param(True, marks=pytest.mark.skipif(not HAS_RESET, reason="FSDP has no public reset")),
        False,
    ],
    ids=["reset", "no reset"],
)
def test_a_replayed_pass_that_fails_under_fsdp_harms_nobody(name: str, has_reset: bool, tmp_path: Path):
    """No rank waits for the one that failed, and FSDP goes on as if it had never begun the pass."""
    for results in run_ranks(failing, 3, name, has_reset, tmp_path, timeout=180):
        for fault, (same, found) in zip([*FAILURES, *ON_ALL], results, strict=True):
            assert same, fault
            assert (found.failures, found.incidents) == ([], [])
            surface = "blocks.0/grad_input" if fault.within == "backward" else "blocks.0/output"
            of_block = [each for each in found.numbers if each.surface == surface]
            failed = {each.peers for each in of_block if each.reason and "replay failed" in each.reason}
            assert failed == {fault.ranks}
            compared = {each.peers for each in of_block if each.status == "agree"}
            assert compared == ({(0, 2)} if fault.ranks == (1,) else set())
            assert {each.status for each in found.numbers if each.surface == "blocks.1/output"} == {"agree"}


def unknown_fsdp(rank: int, run_dir: Path) -> tuple[bool, Report]:
    as_before_reset()
    alone = train(rank, "fsdp2", Trial(steps=5))
    fsdp_state._OF_GROUP += ("_of_another_release",)
    checked = train(rank, "fsdp2", Trial(steps=5, interval=1, run_dir=run_dir, keeps_records=True))
    return alone.bits == checked.bits, checked


def test_without_what_a_reset_needs_layers_are_left_out_and_the_rest_is_compared(tmp_path: Path):
    for same, found in run_ranks(unknown_fsdp, 3, tmp_path, timeout=120):
        assert same
        assert (found.failures, found.incidents) == ([], [])
        reasons = {each.layer: str(each.reason) for each in found.numbers if each.verdict is None}
        assert reasons.keys() == {"tokens", "positions", "blocks.0", "blocks.1", "head"}
        assert all("_of_another_release" in each for each in reasons.values())
        assert {"optimizer/param", "optimizer/reproduced", "state/owned"} <= found.agreed
