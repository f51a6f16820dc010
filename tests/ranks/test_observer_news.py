"""What observers find reaches every trainer, and how a trainer ended is on record."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_dirs import read_ends
from tests.support.small_job import SmallJob, small_job, until
from torchscout.decision.types import EvidenceRecord, Incident, Resolved
from torchscout.faults.storage import can_fill_disks, on_a_small_disk
from torchscout.run.reader import Stamped, read
from torchscout.utils.procfs import is_running

STALL = 4.0


def news_of(job: SmallJob, rank: int) -> list[Any]:
    """What the observer of a rank has sent to its trainer."""
    paths = Path(job._memory.name, "progress").glob(f"news-progress-{rank}-*")
    return [each.item for path in paths for each in read(path) if isinstance(each, Stamped)]


def hang_reaches_every_trainer(run_dir: Path, spoil: Callable[[], object]) -> None:
    """Of a job whose run directory is of no use from some moment on."""
    with small_job(3, run_dir) as job:
        spoil()
        job.order(1, do="sleep", seconds=STALL)
        for rank in range(3):
            until(
                lambda rank=rank: _has(news_of(job, rank), Resolved),
                f"rank {rank} gets the end of the incident, too",
            )
        for rank in range(3):
            (incident,) = [each for each in news_of(job, rank) if isinstance(each, Incident)]
            assert incident.ranks == (1,)
        failed = [each for each in news_of(job, 0) if isinstance(each, EvidenceRecord)]
        assert len(failed) == 1, "once, though two lines could not be written"
        assert failed[0].surface == "run directory"
        assert "cannot be written there: [Errno" in str(failed[0].reason)
        assert not any(_has(news_of(job, rank), EvidenceRecord) for rank in (1, 2)), "the hub is rank 0's"


def _has(items: list[Any], kind: type) -> bool:
    return any(isinstance(each, kind) for each in items)


@pytest.mark.long
def test_a_hang_reaches_every_trainer_without_a_run_directory(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.write_text("a file is in the way")
    hang_reaches_every_trainer(run_dir, lambda: None)


@pytest.mark.slow
def test_a_hang_reaches_every_trainer_when_the_disk_is_full(tmp_path: Path):
    if not can_fill_disks():
        pytest.skip("this machine does not let tests mount a file system")
    (tmp_path / "run").mkdir()
    program = f"from tests.ranks.{Path(__file__).stem} import with_a_full_disk; with_a_full_disk()"
    command = on_a_small_disk(tmp_path / "run", 64, [sys.executable, "-c", program, str(tmp_path / "run")])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No space left" in done.stdout


def with_a_full_disk() -> None:
    run_dir = Path(sys.argv[1])

    def fill() -> None:
        try:
            (run_dir / "filler").write_bytes(bytes(1 << 20))
        except OSError as error:
            print(error)

    hang_reaches_every_trainer(run_dir, fill)


@pytest.mark.long
def test_how_each_trainer_ended_is_recorded(tmp_path: Path):
    with small_job(6, tmp_path, min_silence_seconds=60.0) as job:
        job.order(1, do="exit", status=1)
        job.order(2, do="exit", status=0)
        job.order(3, do="finish")
        until(lambda: all(not is_running(job.trainers[rank].pid) for rank in (1, 2, 3)), "three have ended")
        job.trainers[4].send_signal(signal.SIGTERM)
        job.trainers[5].send_signal(signal.SIGKILL)
        until(lambda: len(read_ends(tmp_path)) == 5, "five have ended")
        ends = read_ends(tmp_path)
        assert {rank: end.how for rank, end in ends.items()} == {
            1: "failed",
            2: "finished",
            3: "finished",
            4: "interrupted",
            5: "killed",
        }
        assert all(end.step > 3 for end in ends.values())
