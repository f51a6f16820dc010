"""Reading ``/proc``, of real processes and of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_job import until
from torchscout.utils import procfs

GIB = 1 << 30
NOBODY = 1 << 22
"""Above the largest process id that Linux gives out."""
MARK = uuid.uuid4().hex
"""Another run of these tests has another one."""
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: None)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """It handles SIGUSR1, and carries a variable; nobody waits for it before the test ends."""
    environment = {**os.environ, "PROCFS_TEST": MARK}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, env=environment
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


def stat_of(pid: int) -> procfs.ProcessStat:
    stat = procfs.process_stat(pid)
    assert stat is not None
    return stat


def test_the_name_of_a_program_does_not_confuse_the_parser(tmp_path: Path):
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as started:
        until(lambda: ") Z 1" in Path(f"/proc/{started.pid}/comm").read_text(), "the program runs", 60)
        assert not stat_of(started.pid).has_ended
        assert stat_of(started.pid).started >= stat_of(os.getpid()).started
        started.kill()


def test_a_process_that_runs_stops_and_ends(process: subprocess.Popen[bytes]):
    pid, begun = process.pid, stat_of(process.pid).started
    assert procfs.is_running(pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: stat_of(pid).is_stopped, "it is stopped", 60)
    assert procfs.is_running(pid)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    until(lambda: stat_of(pid).has_ended, "it has ended", 60)
    assert not procfs.is_running(pid)
    assert (stat_of(pid).started, stat_of(pid).wait_status) == (begun, signal.SIGTERM)
    process.wait()
    assert procfs.process_stat(pid) is None


def test_the_status_with_which_a_process_exited():
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as started:
        until(lambda: stat_of(started.pid).has_ended, "it has ended", 60)
        assert os.waitstatus_to_exitcode(stat_of(started.pid).wait_status) == 3


def test_which_signals_a_process_catches(process: subprocess.Popen[bytes]):
    assert procfs.catches_signal(process.pid, signal.SIGUSR1)
    assert not procfs.catches_signal(process.pid, signal.SIGUSR2)
    process.send_signal(signal.SIGSTOP)
    until(lambda: stat_of(process.pid).is_stopped, "it is stopped", 60)
    assert not procfs.catches_signal(process.pid, signal.SIGUSR1)
    with pytest.raises(FileNotFoundError):
        procfs.catches_signal(NOBODY, signal.SIGUSR1)


def test_descriptors_are_counted():
    before = procfs.open_descriptors(os.getpid())
    with tempfile.TemporaryFile(), tempfile.TemporaryFile():
        assert procfs.open_descriptors(os.getpid()) == before + 2


def test_processes_are_found_by_their_environment(process: subprocess.Popen[bytes]):
    assert list(procfs.processes_with(f"PROCFS_TEST={MARK}")) == [process.pid]
    assert list(procfs.processes_with(f"PROCFS_TEST={MARK[:-1]}")) == []
    process.kill()
    until(lambda: list(procfs.processes_with(f"PROCFS_TEST={MARK}")) == [], "its memory is gone", 60)


def test_file_systems_in_memory():
    assert procfs.is_in_memory(Path("/dev/shm"))
    assert not procfs.is_in_memory(Path("/proc"))


def machine(
    folder: Path, available: int, groups: dict[str, tuple[str, int, int]], own: str
) -> tuple[Path, Path]:
    """Files as the kernel shows them."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {available // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(own)
    for name, (most, used, cached) in groups.items():
        (cgroups / name).mkdir(parents=True, exist_ok=True)
        prefix, total = ("memory.max", "memory.current"), ""
        if name.startswith("memory"):
            prefix, total = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        (cgroups / name / prefix[0]).write_text(f"{most}\n")
        (cgroups / name / prefix[1]).write_text(f"{used}\n")
        (cgroups / name / "memory.stat").write_text(f"anon 1\n{total}inactive_file {cached}\n")
    return proc, cgroups


@pytest.mark.parametrize(
    ("groups", "own", "expected"),
    [
        ({}, "0::/\n", 22 * GIB),
        ({"job": ("max", GIB, 0)}, "0::/job\n", 22 * GIB),
        ({"job": (str(8 * GIB), 5 * GIB, GIB)}, "0::/job\n", 4 * GIB),
        ({"a": (str(6 * GIB), 5 * GIB, 0), "a/b": ("max", GIB, 0)}, "0::/a/b\n", GIB),
        ({"memory/job": (str(4 * GIB), GIB, 0)}, "5:cpu:/job\n4:memory:/job\n", 3 * GIB),
        ({"job": (str(GIB), 2 * GIB, 0)}, "0::/job\n", 0),
    ],
)
def test_memory_is_what_the_machine_and_every_group_has_left(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], own: str, expected: int
):
    assert procfs.available_memory(*machine(tmp_path, 22 * GIB, groups, own)) == expected
    assert 0 < procfs.available_memory() < 1 << 50
