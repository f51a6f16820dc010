"""Machines whose names mean nothing to each other: the job trains and keeps checkpoints, without copies."""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Plan, Result, train
from tests.support.ranks import run_ranks

_NEW_HOST_NAMES = 0x04000000  # CLONE_NEWUTS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process another host name")


def train_as_unknown_host(rank: int, plan: Plan) -> Result:
    """A host name of its own, which nothing resolves."""
    assert ctypes.CDLL(None, use_errno=True).unshare(_NEW_HOST_NAMES) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(f"unknown-{rank}.invalid")
    return train(rank, plan)


def test_host_names_that_do_not_resolve_do_not_end_a_job(tmp_path: Path):
    plan = Plan(
        "ddp",
        4,
        interval=1,
        directory=tmp_path / "files",
        memory=tmp_path / "memory",
        run_dir=tmp_path / "run",
    )
    results = run_ranks(train_as_unknown_host, 2, plan, timeout=60)
    for rank, each in enumerate(results):
        assert each.failures == []
        assert each.status["latest"] == 3
        assert each.status["copied"] is None
        (problem,) = [one for one in each.status["problems"] if "no copies are kept" in one]
        assert f"unknown-{1 - rank}.invalid" in problem
        assert "ObserverConfig.address" in problem
    again = replace(plan, steps=5, run_dir=tmp_path / "again")
    assert [each.resumed and each.resumed.step for each in run_ranks(train, 2, again, timeout=60)] == [4, 4]
