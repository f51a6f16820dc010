"""What an observer keeps of a trainer that stood still before it ended: real processes, and the signals that
end them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchscout.config import ObserverConfig
from torchscout.observer.record.directory import End
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.rounds.post import Post
from torchscout.observer.rounds.post_writer import post_of
from torchscout.observer.rounds.rank_report import RankReport
from torchscout.observer.trainer import Ending, TrainerView

CONFIG = ObserverConfig(min_silence_seconds=1.2)
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from torchscout.decision.progress import CommGroup, Phase
from torchscout.observer.record.writer import ProgressWriter

writer = ProgressWriter.create(Path(sys.argv[1]), 0)
line = writer.declare(CommGroup("world", (0, 1), "world", timeout=float(sys.argv[4])))
writer.issue(line, writer.phrase("all_reduce", 1))
writer.device_entered(line, sys.argv[3] == "waits")
print(writer.path, flush=True)
end = time.monotonic() + float(sys.argv[2])
while (now := time.monotonic()) < end:
    if sys.argv[3] == "moves":
        writer.advance(Phase.FORWARD)
    writer.device_asked(True, now)
    time.sleep(0.01)
writer.device_entered(line, 1)  # as if communicators had been aborted, or the others had come
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGABRT)
"""


def ended(folder: Path, seconds: float, how: str, timeout: float = 600.0) -> RankReport:
    """What the observer says of a trainer once it has ended."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(seconds), how, str(timeout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        trainer = TrainerView(Path(process.stdout.readline().strip()), None)
        deadline = time.monotonic() + 30
        while trainer.ending is None and time.monotonic() < deadline:
            trainer.look(time.monotonic())
            time.sleep(0.05)
        return Post(post_of(trainer.report(CONFIG, 0.0, time.monotonic())), 8).report()


def test_what_a_trainer_waited_for_is_kept_when_a_watchdog_has_ended_it(tmp_path: Path):
    report = ended(tmp_path, 2.0, "stands still")
    assert report.gone_seconds is not None
    assert not report.was_killed
    assert report.status.progress.entered == {"world": 1}
    assert report.stalled is not None
    assert report.stalled.entered == {"world": 0}


@pytest.mark.parametrize(("seconds", "how"), [(2.0, "moves"), (0.3, "stands still")])
def test_a_trainer_that_ends_in_the_middle_of_its_work_waited_for_nobody(
    seconds: float, how: str, tmp_path: Path
):
    report = ended(tmp_path, seconds, how)
    assert report.gone_seconds is not None
    assert report.stalled is None


@pytest.mark.parametrize(
    ("marked", "ending"), [(None, Ending.FAILED), ("this", Ending.ASKED), ("earlier", Ending.FAILED)]
)
def test_sigterm_is_known_from_the_run_directory_where_a_parent_took_the_exit_status(
    marked: str | None, ending: Ending, tmp_path: Path
):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "600", "moves", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        record = Path(process.stdout.readline().strip())
        trainer = TrainerView(record, None, tmp_path)
        process.terminate()
        process.wait()
    if marked is not None:
        End(trainer.rank, "interrupted", 0, str(record) if marked == "this" else "earlier").write(tmp_path)
    trainer.look(time.monotonic())
    assert trainer.ending is ending


@pytest.mark.slow_cases("1.5-moves-False", "600.0-waits-False")
@pytest.mark.parametrize(
    ("timeout", "how", "is_over"), [(1.5, "waits", True), (600.0, "waits", False), (1.5, "moves", False)]
)
def test_a_wait_as_long_as_the_timeout_of_its_group_is_known_afterwards(
    timeout: float, how: str, is_over: bool, tmp_path: Path
):
    report = ended(tmp_path, 2.5, how, timeout)
    assert report.has_timed_out is is_over


def test_a_trainer_that_an_exception_ends_has_failed_before_its_process_is_gone(tmp_path: Path):
    """Its exit may take long, and a launcher may end it with SIGTERM meanwhile."""
    writer = ProgressWriter.create(tmp_path, 0)  # of this very process
    try:
        trainer = TrainerView(writer.path, None)
        trainer.look(time.monotonic())
        assert trainer.ending is None
        writer.failing()
        trainer.look(time.monotonic())
        assert trainer.ending is Ending.FAILED
        assert trainer.how(Ending.FAILED) == "failed"
        assert trainer.report(CONFIG, 0.0, time.monotonic()).gone_seconds is not None
    finally:
        writer.close()
