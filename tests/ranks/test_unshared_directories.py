"""What checks find is in the run directory of every machine, also of those that share no file system."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.replayed_job import Found, checked_training
from torchscout.communicators import Job
from torchscout.decision.types import Started, Trust
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.run.folder import HISTORY_FILE
from torchscout.run.reader import IncidentLog, Stamped, read
from torchscout.utils.private_files import first_text

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
CAN_MOUNT = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
needs_mounts = pytest.mark.skipif(not CAN_MOUNT, reason="this machine does not let tests mount folders")


def on_two_machines(rank: int, faults: FaultPlan, steps: int, run_dir: Path) -> Found:
    """Ranks 2 and 3 have a run directory of their own, under the same name."""
    os.environ["TORCHSCOUT_HOST"] = f"node-{rank // 2}"
    if rank >= 2:
        assert ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", other(run_dir), run_dir], check=True)
    return checked_training(rank, faults, steps, [], run_dir)


def other(run_dir: Path) -> Path:
    return run_dir.with_name("other")


@pytest.mark.long_cases("there")
@needs_mounts
@pytest.mark.parametrize(
    ("faults", "named"),
    [
        (FaultPlan().set_value(rank=3, at="stack.0.up/weight", step=3, value=3.0), (3,)),
        (FaultPlan().set_value(rank=0, at="stack.0.up/weight", step=3, value=3.0), (0,)),
        (FaultPlan(), None),
    ],
    ids=["there", "here", "nothing"],
)
def test_both_machines_have_what_a_check_found(
    faults: FaultPlan, named: tuple[int, ...] | None, tmp_path: Path
):
    run_dir = tmp_path / "run"
    for folder in (run_dir, other(run_dir)):
        folder.mkdir()
    found = run_ranks(on_two_machines, 4, faults, 4, run_dir, timeout=120)
    assert [each.failures for each in found] == [[]] * 4
    assert [each.unfired for each in found] == [0] * 4
    logs = [IncidentLog.read(folder) for folder in (run_dir, other(run_dir))]
    for log in logs:
        assert [each.ranks for each in log.incidents] == ([] if named is None else [named])
        assert [each.ranks for each in log.decisions] == ([] if named is None else [named])
    assert logs[0].incidents == logs[1].incidents
    assert not (other(run_dir) / "ranks" / "rank-0.json").exists(), "they share nothing"
    history = [[*read(folder / HISTORY_FILE)] for folder in (run_dir, other(run_dir))]
    for lines in history:
        items = [line.item for line in lines if isinstance(line, Stamped)]
        assert isinstance(items[0], Started)
        assert [each.step for each in items if isinstance(each, Trust)] == [1, 2, 3, 4]


def job(rank: int, *directories: str | None) -> Job:
    return Job(rank, Mesh.grid(replica=4), ["a"] * 4, "", Path(), directories=directories)


def test_the_first_rank_of_each_other_directory_copies():
    assert not any(job(rank, *"aaaa").copies_from(0) for rank in range(4))
    assert [job(rank, *"aabb").copies_from(0) for rank in range(4)] == [False, False, True, False]
    assert [job(rank, *"aabb").copies_from(3) for rank in range(4)] == [True, False, False, False]
    assert [job(rank, *"abca").copies_from(3) for rank in range(4)] == [False, True, True, False]
    assert [job(rank, None, None, "b", "b").copies_from(0) for rank in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert not job(0).copies_from(1), "a job that does not know its directories"


def test_all_that_share_a_folder_get_the_same_text(tmp_path: Path):
    assert [first_text(tmp_path / "name", text) for text in ("one", "two")] == ["one", "one"]
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
    assert (tmp_path / "name").stat().st_mode & 0o777 == 0o600
