"""What an observer reports of a real trainer: how it ended, how long it waits, what its record lacks.

What is concluded from that is held by ``tests/scenarios``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchscout.collectives.interceptor import Handle, listen
from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, How, Phase, Process, RankReport
from torchscout.observer.publisher import Publisher
from torchscout.observer.record import layout
from torchscout.observer.record import writer as writer_module
from torchscout.observer.record.writer import ProgressWriter
from torchscout.observer.trainer import Ending, TrainerView
from torchscout.run.folder import End

CONFIG = ObserverConfig(min_silence_seconds=1.2)
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from torchscout.observer.record.writer import ProgressWriter
writer = ProgressWriter.create(Path(sys.argv[1]), 0)
print(writer.path, flush=True)
sys.stdin.readline()
{end}
"""


@contextmanager
def a_trainer(folder: Path, end: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A trainer that ends like that once it is told to."""
    command = [sys.executable, "-c", SCRIPT.format(end=end), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def reported(trainer: TrainerView, now: float | None = None) -> RankReport:
    now = time.monotonic() if now is None else now
    trainer.look(now)
    assert trainer.progress is not None
    return trainer.report(CONFIG, trainer.progress.silent_seconds, now)


@pytest.mark.parametrize(
    ("end", "is_reaped", "ending", "how", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", False, Ending.FAILED, "killed", 9),
        ("os.kill(os.getpid(), signal.SIGKILL)", True, Ending.FAILED, "unknown", None),
        ("sys.exit(3)", False, Ending.FAILED, "failed", 3 << 8),
        ("os.kill(os.getpid(), signal.SIGTERM)", False, Ending.ASKED, "asked", 15),
        ("sys.exit(143)", False, Ending.ASKED, "asked", 143 << 8),
        ("writer.restarting(); sys.exit(1)", False, Ending.ASKED, "asked", 1 << 8),
        ("os._exit(0)", False, Ending.LEFT, "failed", 0),
        ("writer.finished()", False, Ending.FINISHED, None, None),
    ],
)
def test_how_a_trainer_ended(
    end: str, is_reaped: bool, ending: Ending, how: How | None, status: int | None, tmp_path: Path
):
    """Once its parent has taken the exit status, nobody else can know it."""
    with a_trainer(tmp_path, end) as (process, record):
        trainer = TrainerView(record, None)
        assert reported(trainer).process is Process.RUNNING
        process.stdin.close()
        if is_reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        report = reported(trainer)
    assert trainer.ending is ending
    assert (report.how, report.wait_status) == (how, status)
    has_finished = ending is Ending.FINISHED
    assert (report.process is Process.GONE) is (report.gone_seconds is not None) is (not has_finished)
    assert report.waiting is (False if has_finished else None)


@pytest.mark.parametrize(
    ("marked", "ending"), [(None, Ending.FAILED), ("this", Ending.ASKED), ("earlier", Ending.FAILED)]
)
def test_sigterm_is_known_from_the_run_directory_where_a_parent_took_the_exit_status(
    marked: str | None, ending: Ending, tmp_path: Path
):
    with a_trainer(tmp_path, "") as (process, record):
        trainer = TrainerView(record, None, tmp_path)
        process.terminate()
        process.wait()
    if marked is not None:
        End(trainer.rank, "interrupted", 0, str(record) if marked == "this" else "earlier").write(tmp_path)
    trainer.look(time.monotonic())
    assert trainer.ending is ending


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ProgressWriter]:
    """Of this very process."""
    writer = ProgressWriter.create(tmp_path, 0)
    yield writer
    writer.close()


def test_a_trainer_that_an_exception_ends_has_failed_before_its_process_is_gone(writer: ProgressWriter):
    """Its exit may take long, and a launcher may end it with SIGTERM meanwhile."""
    trainer = TrainerView(writer.path, None)
    assert reported(trainer).how is None
    writer.failing()
    report = reported(trainer)
    assert trainer.ending is Ending.FAILED
    assert trainer.how(Ending.FAILED) == report.how == "failed"
    assert report.gone_seconds is not None


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_trainer_that_sigterm_ends_is_asked_about_if_it_has_trained(
    writer: ProgressWriter, has_begun: bool
):
    if has_begun:
        writer.advance(Phase.FORWARD)
    trainer = TrainerView(writer.path, None)
    assert reported(trainer).gone_seconds is None
    assert not trainer.is_verdict_due
    writer.asked()
    report = reported(trainer)
    assert (trainer.ending, report.how, report.process) == (Ending.ASKED, "asked", Process.GONE)
    assert report.gone_seconds is not None
    assert trainer.is_verdict_due is has_begun


@pytest.mark.parametrize("marks", [["failing", "asked"], ["asked", "failing"]])
def test_a_trainer_that_fails_was_not_asked(writer: ProgressWriter, marks: list[str]):
    """A launcher ends it while the exception does."""
    for each in marks:
        getattr(writer, each)()
    trainer = TrainerView(writer.path, None)
    assert reported(trainer).how == "failed"


@pytest.mark.parametrize(
    ("silent", "is_inside", "near_timeout", "has_timed_out"),
    [
        (8.0, True, False, False),
        (8.6, True, True, False),
        (9.6, True, True, True),
        (99.0, False, False, False),
    ],
)
def test_a_rank_that_waits_knows_how_close_its_timeout_is(
    writer: ProgressWriter,
    monkeypatch: pytest.MonkeyPatch,
    silent: float,
    is_inside: bool,
    near_timeout: bool,
    has_timed_out: bool,
):
    phrase = writer.phrase("barrier", 7)
    for name, timeout in (("patient", 600.0), ("impatient", 10.0)):
        group = writer.declare(CommGroup(name, (0, 1), name, timeout=timeout))
    writer.issue(group, phrase)
    if not is_inside:
        writer.advance(Phase.FORWARD)
    trainer, now = TrainerView(writer.path, None), time.monotonic() + silent
    report = reported(trainer, now)
    assert (report.near_timeout, report.has_timed_out) == (near_timeout, has_timed_out)
    if has_timed_out:
        monkeypatch.setattr(writer_module, "monotonic", lambda: now + 1)
        writer.advance(Phase.FORWARD)
        later = reported(trainer, now + 4)
        assert later.has_timed_out, "a watchdog may still end it because of that"
        assert later.stalled is not None
        assert later.stalled.inside == ("impatient", 1)


def test_a_record_without_room_for_a_group_is_incomplete(writer: ProgressWriter):
    trainer = TrainerView(writer.path, None)
    for number in range(layout.LINES):
        writer.declare(CommGroup(str(number), (0, 1), ""))
    assert not reported(trainer).is_incomplete
    writer.declare(CommGroup("one more", (0, 1), ""))
    assert reported(trainer).is_incomplete


def test_the_record_of_a_publisher_that_failed_is_incomplete(writer: ProgressWriter):
    trainer, errors = TrainerView(writer.path, None), list[Exception]()
    Handle(Publisher(writer), errors.append).before(SimpleNamespace())  # it has nothing that a call has
    assert len(errors) == 1
    assert reported(trainer).is_incomplete


def test_what_gloo_refuses_is_not_counted(writer: ProgressWriter):
    trainer = TrainerView(writer.path, None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with listen(Publisher(writer)):
            dist.all_gather([torch.ones(2)], torch.ones(2))
            before = reported(trainer).progress
            with pytest.raises(RuntimeError, match="invalid tensor size"):
                dist.all_gather([torch.ones(3)], torch.ones(2))
            refused = reported(trainer)
            dist.all_gather([torch.ones(2)], torch.ones(2))
            after = reported(trainer).progress
    finally:
        dist.destroy_process_group()
    assert before is not None
    assert refused.progress is not None
    assert after is not None
    (key,) = before.issued
    assert [each.issued[key] for each in (before, refused.progress, after)] == [1, 1, 2]
    assert refused.progress.recent == before.recent
    assert refused.progress.inside is None, "it has left the operation"
    assert not refused.is_incomplete
    assert after.recent[-1].fingerprint == before.recent[-1].fingerprint
