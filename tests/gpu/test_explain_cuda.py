"""On NCCL ranks without torchscout: `scout explain` names the late rank from Flight Recorder dumps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from typer.testing import CliRunner

from tests.support.ranks import run_ranks
from torchscout.cli.main import app
from torchscout.observer.flight_recorder import open_operations

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3)]
RANKS = 3
LATE_SECONDS = 8.0


def environment(*, timed: bool) -> dict[str, str]:
    """The recorder is on; ``timed``: it tells what a device has begun."""
    size = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    return {**size, "TORCH_NCCL_ENABLE_TIMING": "1" if timed else "0"}


def late(rank: int, folder: str) -> Any:
    """Rank 2 sleeps before its all-reduce; all dump in the middle of that, and the job then goes on."""
    training = dist.new_group(group_desc="training")
    for _ in range(3):
        dist.all_reduce(torch.ones(8, device="cuda"), group=training)
    torch.cuda.synchronize()
    time.sleep(1.0)  # the watchdog notices that they have completed
    pending = (
        dist.all_reduce(torch.ones(5, device="cuda"), group=training, async_op=True) if rank != 2 else None
    )
    time.sleep(LATE_SECONDS / 2)
    dump(rank, Path(folder))
    seen = open_operations()
    time.sleep(LATE_SECONDS / 2)
    if pending is None:
        pending = dist.all_reduce(torch.ones(5, device="cuda"), group=training, async_op=True)
    pending.wait()
    torch.cuda.synchronize()
    return seen


def stuck_device(rank: int, folder: str) -> Any:
    """Rank 2's host issues the all-reduce, behind a kernel that takes long."""
    training = dist.new_group(group_desc="training")
    for _ in range(3):
        dist.all_reduce(torch.ones(8, device="cuda"), group=training)
    torch.cuda.synchronize()
    time.sleep(1.0)
    if rank == 2:
        torch.cuda._sleep(int(LATE_SECONDS * 1.9e9))
    pending = dist.all_reduce(torch.ones(5, device="cuda"), group=training, async_op=True)
    time.sleep(LATE_SECONDS / 2)
    dump(rank, Path(folder))
    pending.wait()
    torch.cuda.synchronize()


def healthy(rank: int, folder: str) -> Any:
    for _ in range(3):
        dist.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    time.sleep(2.0)
    dump(rank, Path(folder))
    time.sleep(1.0)


def dump(rank: int, folder: Path) -> None:
    for name in ("pickle", "json", "active"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "pickle" / f"nccl_trace_rank_{rank}").write_bytes(c10d._dump_nccl_trace())
    for name, only_active in (("json", False), ("active", True)):
        document = c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=only_active)
        data = document.encode() if isinstance(document, str) else document
        (folder / name / f"rank{rank}.json").write_bytes(data)


def ran(body: Callable[..., Any], folder: Path, *, timed: bool) -> list[Any]:
    settings = environment(timed=timed)
    return run_ranks(body, RANKS, str(folder), timeout=120.0, backend="nccl", environment=settings)


def explained(folder: Path) -> dict[str, Any]:
    done = CliRunner(env={"COLUMNS": None}).invoke(app, ["explain", str(folder), "--json"])
    assert done.exit_code in (0, 1), done.output
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["hang"] is (done.exit_code == 1)
    return document


@pytest.mark.parametrize("timed", [False, True])
def test_a_rank_that_is_late(tmp_path: Path, timed: bool):
    seen = ran(late, tmp_path, timed=timed)
    for form in ("pickle", "json", "active"):
        found = explained(tmp_path / form)
        assert found["ranks"] == [2], (form, found)
        assert "has not entered all_reduce float32[5] number 4 of group training" in found["sentence"]
    assert [each["open"] for each in seen] == [1, 1, 0]
    assert seen[0]["operations"][0]["operation"] == "all_reduce float32[5]"


def test_a_device_that_is_stuck(tmp_path: Path):
    ran(stuck_device, tmp_path, timed=True)
    found = explained(tmp_path / "pickle")
    assert found["ranks"] == [2], found
    assert "its device has not begun" in found["sentence"]


def test_a_job_that_does_not_hang(tmp_path: Path):
    ran(healthy, tmp_path, timed=False)
    assert explained(tmp_path / "pickle")["hang"] is False
    assert explained(tmp_path / "json")["hang"] is False
