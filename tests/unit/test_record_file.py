"""The file of a progress record: who may use it, whose it is, and when it is removed."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.other_process import line_from, running
from tests.support.small_job import until
from torchscout.decision.progress import CommGroup, Phase, Process
from torchscout.observer.record import layout
from torchscout.observer.record.directory import ProcessIdentity, reclaim
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter

WORLD = CommGroup("world", (0, 1, 2, 3), "default group")
SUM = ("all_reduce float32[8] sum", 0x1234)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ProgressWriter]:
    writer = ProgressWriter.create(tmp_path / "job", rank=2)
    yield writer
    writer.close()


def hold(directory: str) -> None:
    """A trainer that publishes once and is then in a communication for ever."""
    writer = ProgressWriter.create(Path(directory), rank=5)
    writer.issue(writer.declare(WORLD), writer.phrase(*SUM))
    print(writer.path, flush=True)
    time.sleep(600)


def test_only_the_owner_can_use_it_and_nobody_guesses_its_name(tmp_path: Path):
    writers = [ProgressWriter.create(tmp_path / "new" / "job", rank=1) for _ in range(2)]
    assert stat.S_IMODE((tmp_path / "new" / "job").stat().st_mode) == 0o700
    for writer in writers:
        assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
        assert len(writer.path.name.rpartition("-")[2]) == 32
    assert writers[0].path != writers[1].path
    for writer in writers:
        writer.close()


def test_a_directory_that_others_can_use_and_a_link_are_refused(tmp_path: Path):
    directory, link = tmp_path / "open", tmp_path / "link"
    directory.mkdir()
    for mode in (0o755, 0o770, 0o701):
        directory.chmod(mode)
        with pytest.raises(ValueError, match="open must be a directory"):
            ProgressWriter.create(directory, rank=0)
    directory.chmod(0o700)
    link.symlink_to(directory)
    with pytest.raises(ValueError, match="link must be a directory"):
        ProgressWriter.create(link, rank=0)


def test_closing_removes_it_and_late_calls_do_no_harm(writer: ProgressWriter):
    reader = ProgressReader(writer.path)
    index, phrase = writer.declare(WORLD), writer.phrase(*SUM)
    writer.advance(Phase.FORWARD)
    writer.close()
    writer.close()
    assert list(writer.path.parent.iterdir()) == []
    writer.advance(Phase.BACKWARD)
    writer.issue(index, phrase)
    writer.declare(CommGroup("2>3", (2, 3), "2 -> 3", pair=True))
    writer.next_step()
    progress = reader.read()
    assert (progress.coordinate, progress.phase) == ((0, 1), Phase.FORWARD)


def test_a_forked_child_leaves_the_record_alone(writer: ProgressWriter):
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            writer.advance(Phase.FORWARD)

    thread = threading.Thread(target=publish)
    thread.start()  # so that many forks happen while the lock is held
    try:
        children = [fork_and_publish(writer) for _ in range(30)]
    finally:
        stop.set()
        thread.join()
    until = time.monotonic() + 20
    assert [exit_status(child, until) for child in children] == [0] * 30
    progress = ProgressReader(writer.path).read()
    assert (progress.step, progress.phase) == (0, Phase.FORWARD)


def fork_and_publish(writer: ProgressWriter) -> int:
    child = os.fork()
    if child == 0:
        writer.next_step()
        writer.advance(Phase.INPUT)
        writer.close()
        os._exit(0)
    return child


def exit_status(child: int, until: float) -> int | None:
    """None if it does not end in time."""
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def corrupted(writer: ProgressWriter, at: int, value: bytes) -> Path:
    with writer.path.open("r+b") as file:
        file.seek(at)
        file.write(value)
    return writer.path


def test_foreign_files_are_refused_by_name(writer: ProgressWriter, tmp_path: Path):
    foreign = tmp_path / "foreign"
    foreign.touch(mode=0o600)
    for content in (b"", b"#!/bin/sh", bytes(layout.SIZE)):
        foreign.write_bytes(content)
        with pytest.raises(ValueError, match="foreign is not a progress record"):
            ProgressReader(foreign)
    foreign.write_bytes(writer.path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"foreign has {layout.SIZE - 1} bytes"):
        ProgressReader(foreign)
    with pytest.raises(ValueError, match=f"{writer.path} is a progress record of version 77"):
        ProgressReader(corrupted(writer, 8, b"\x4d"))
    with pytest.raises(ValueError, match=f"{writer.path} is not a progress record"):
        ProgressReader(corrupted(writer, 0, b"x"))


def test_a_file_that_others_can_write_is_refused(writer: ProgressWriter):
    writer.path.chmod(0o620)
    with pytest.raises(ValueError, match="not a file that belongs to this user alone"):
        ProgressReader(writer.path)


# ---------------------------------------------------------------- The trainer


def test_what_the_system_says_of_the_trainer(tmp_path: Path):
    with running(hold, tmp_path / "job") as trainer:
        reader = ProgressReader(Path(line_from(trainer)))
        assert (reader.pid, reader.rank) == (trainer.pid, 5)
        assert reader.trainer() is Process.RUNNING
        trainer.send_signal(signal.SIGSTOP)
        until(lambda: reader.trainer() is Process.STOPPED, "it is stopped")
        trainer.send_signal(signal.SIGCONT)
        until(lambda: reader.trainer() is Process.RUNNING, "it goes on")
        trainer.kill()
        os.waitid(os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
        assert Path(f"/proc/{trainer.pid}").exists()
        assert reader.trainer() is Process.GONE
        trainer.wait()
        assert reader.trainer() is Process.GONE
        progress = reader.read()
        assert (progress.issued, progress.at_communication) == ({"world": 1}, True)


def test_a_recycled_number_or_another_boot_is_not_the_trainer():
    own = ProcessIdentity.own()
    assert own.process() is Process.RUNNING
    assert own._replace(started=own.started + 1).process() is Process.GONE
    assert own._replace(boot=bytes(16)).process() is Process.GONE


def test_only_records_of_the_dead_are_reclaimed(tmp_path: Path):
    directory = tmp_path / "job"
    alive = ProgressWriter.create(directory, rank=0)
    recycled = ProgressWriter.create(directory, rank=1)
    started = layout.HEADER.unpack(recycled.path.read_bytes()[: layout.HEADER.size])[4]
    corrupted(recycled, 32, (started + 1).to_bytes(8, sys.byteorder))
    with running(hold, directory) as trainer:
        killed, dead = Path(line_from(trainer)), ProgressReader(recycled.path)
        trainer.send_signal(signal.SIGSTOP)
        assert reclaim(directory) == [recycled.path]
        trainer.kill()
        trainer.wait()
    (directory / "progress-7-in-the-making").touch()
    (directory / "notes").write_text("a user's own")
    (directory / "progress-8-link").symlink_to(killed)
    assert reclaim(directory) == [killed]
    left = sorted(path.name for path in directory.iterdir())
    assert left == sorted(["notes", "progress-7-in-the-making", "progress-8-link", alive.path.name])
    assert dead.read().coordinate == (0, 0)
    alive.close()
    recycled.close()


def test_there_is_nothing_to_reclaim_where_nothing_was(tmp_path: Path):
    assert reclaim(tmp_path / "never made") == []


def test_a_group_may_have_more_operations_than_32_bits_count():
    memory = layout.Memory(mmap.mmap(-1, layout.SIZE))
    number = 2**31 + 5
    memory.put_operation(7, layout.pack_operation(7, 3, number, 2**31, 11, 12))
    found = memory.operation(7)
    assert found is not None
    assert (found.line, found.number, found.phrase) == (3, number, 2**31)


def test_without_a_descriptor_left_nobody_is_called_gone():
    own = ProcessIdentity.own()
    own.process()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))  # every number below it is in use, or will be
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        assert own.process() is Process.RUNNING
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in (spare, *taken):
            os.close(each)
