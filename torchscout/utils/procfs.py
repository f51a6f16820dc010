"""What Linux says in ``/proc`` about processes, mounts and memory. Everything that parses it is here.

Where there is no ``/proc``, no process is found and no file system counts as memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "MemoryKills",
    "ProcessStat",
    "available_memory",
    "boot_id",
    "catches_signal",
    "core_wait_seconds",
    "is_in_memory",
    "is_running",
    "open_descriptors",
    "owner_of_connection",
    "process_stat",
    "processes_with",
]

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_SCHEDSTAT = _PROC / "thread-self" / "schedstat"
_IN_MEMORY = {"tmpfs", "ramfs"}


class ProcessStat(NamedTuple):
    """A process as ``/proc/PID/stat`` shows it."""

    state: str
    """One letter; see ``man 5 proc``."""
    started: int
    """When it began, in clock ticks since the boot: a recycled process id has another."""
    wait_status: int
    """Once it has ended, its status as ``os.waitpid`` returns it."""

    @property
    def has_ended(self) -> bool:
        """Whether only its entry is left, because its parent has not waited for it yet."""
        return self.state in "ZXx"

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


def process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None if there is no such process.

    Raises ``OSError`` if that is not known, for example because no file descriptor is left.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return None
    # The second field, the program's name, may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return ProcessStat(state=fields[0], started=int(fields[19]), wait_status=int(fields[49]))


def is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended; raises ``OSError`` as ``process_stat`` does."""
    stat = process_stat(pid)
    return stat is not None and not stat.has_ended


class MemoryKills:
    """Whether the kernel ends processes for lack of memory, from now on: in the cgroup of a process, or
    anywhere on this machine."""

    def __init__(self, pid: int) -> None:
        self._events = _memory_events_of(pid)
        self._before = self._counts()

    def since(self) -> str:
        """Say what has happened since; empty if nothing has, or nothing is known."""
        in_cgroup, anywhere = (now > was for now, was in zip(self._counts(), self._before, strict=True))
        if in_cgroup:
            return "out of memory: its cgroup has reached its limit"
        return "the kernel has ended a process of this machine for lack of memory" if anywhere else ""

    def _counts(self) -> tuple[int, int]:
        in_cgroup = 0 if self._events is None else _counter(self._events, "oom_kill")
        return in_cgroup, _counter(_PROC / "vmstat", "oom_kill")


def _memory_events_of(pid: int) -> Path | None:
    """Return the file of the process's cgroup that counts such ends, of version 1 or 2."""
    try:
        lines = [line.split(":", 2) for line in (_PROC / str(pid) / "cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in lines:
        if controllers == "memory":
            return _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
    return next((_CGROUPS / each[2].lstrip("/") / "memory.events" for each in lines if not each[1]), None)


def _counter(path: Path, name: str) -> int:
    """Return the number after this name in a file of the kernel; 0 if there is none."""
    try:
        found = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
        return int(found.get(name, 0))
    except (OSError, ValueError):
        return 0


@cache
def boot_id() -> bytes:
    """Return the 16 bytes that identify this boot of the machine."""
    return bytes.fromhex((_PROC / "sys/kernel/random/boot_id").read_text().replace("-", ""))


def catches_signal(pid: int, number: int) -> bool:
    """Return whether the process runs and has a handler for the signal; raises ``OSError`` if it is gone."""
    text = (_PROC / str(pid) / "status").read_text(errors="replace")
    status = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    is_halted = status["State"].split()[0] in "TtZXx"
    return not is_halted and bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def open_descriptors(pid: int) -> int:
    """Return how many file descriptors the process has open; raises ``OSError`` if that is not allowed."""
    return len([*(_PROC / str(pid) / "fd").iterdir()])


def processes_with(variable: str) -> Iterator[int]:
    """Yield the other running processes of this user that were started with ``NAME=VALUE`` in their
    environment."""
    wanted, own = variable.encode(), str(os.getpid())
    for folder in _PROC.iterdir():
        if not folder.name.isdigit() or folder.name == own:
            continue
        try:
            environment = (folder / "environ").read_bytes()  # empty once the process has ended
        except OSError:  # it is gone, or belongs to another user
            continue
        if wanted in environment.split(b"\0"):
            yield int(folder.name)


def core_wait_seconds() -> float:
    """Return for how long this thread has been ready to run without a core, or 0 where that is unknown."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def is_in_memory(folder: Path) -> bool:
    """Return whether the folder's file system is made of memory."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = (_PROC / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = {line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number}
    return bool(kinds & _IN_MEMORY)


def available_memory(proc: Path = _PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take: of the machine, and of every control group that it
    is in."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    limits = [1024 * int(meminfo["MemAvailable"].split()[0])]
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = cgroups / ("memory" if controllers else "") / path.lstrip("/")
        limits += [left for each in (folder, *folder.parents) if (left := _left_in(each)) is not None]
    return max(0, min(limits))


def _left_in(group: Path) -> int | None:
    """Return what a control group has left; memory that only caches files counts as free."""
    for limit, usage, cached in (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            rows = (group / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such group here, or its limit is "max"
            continue
        return most - used + sum(int(row.removeprefix(cached)) for row in rows if row.startswith(cached))
    return None


def owner_of_connection(port: int, to: int) -> int | None:
    """Return the user who has connected this local port to another port of this machine; None if unknown."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, _, _, _, _, user, *_ = line.split()
            if (int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)) == (port, to):
                return int(user)
    return None
