"""Whether a process still lives, though its number may have been given to another (paper, section 7).

Linux only: everything is read from ``/proc``. A process that is blocked in the kernel is running.
"""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torchscout.decision.progress import Process

__all__ = ["Identity"]

_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}


class Identity(NamedTuple):
    """One process of one machine, never confused with a later one."""

    pid: int
    started: int
    """When it began, in clock ticks since the boot: a recycled ``pid`` has another."""
    boot: bytes
    """The machine's boot, 16 bytes: ticks of different boots say nothing."""

    @classmethod
    def own(cls) -> Identity:
        stat = _stat(os.getpid())
        assert stat is not None, "a process finds itself in /proc"
        return cls(os.getpid(), stat.started, _boot())

    def process(self) -> Process:
        """What the operating system says of it now."""
        try:
            stat = _stat(self.pid)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            return Process.RUNNING  # as far as is known; its pidfd tells of its end all the same
        if stat is None or stat.started != self.started or stat.state in "ZXx" or self.boot != _boot():
            return Process.GONE
        return Process.STOPPED if stat.state in "Tt" else Process.RUNNING


class _Stat(NamedTuple):
    state: str
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while we read
        return None
    # The second field, the program's name, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return _Stat(state=fields[0], started=int(fields[19]))


@cache
def _boot() -> bytes:
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""))
