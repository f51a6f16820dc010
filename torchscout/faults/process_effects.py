"""What a fault does to its own process: sleep, stop, die, keep the interpreter (paper, section 7)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Freeze", "HoldInterpreter", "ProcessEffect", "Signal", "Sleep", "StayInside"]


class ProcessEffect(ABC):
    """Something that happens to the process at a place."""

    def prepare(self) -> None:  # noqa: B027  most need nothing
        """Called when the fault is armed, before training: what takes time must not delay the fault."""

    @abstractmethod
    def happen(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sleep(ProcessEffect):
    seconds: float

    def happen(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class StayInside(Sleep):
    """Within a collective that it has entered as all others have: the transport is stuck, not the rank."""


@dataclass(frozen=True, slots=True)
class Signal(ProcessEffect):
    number: signal.Signals

    def happen(self) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class Freeze(ProcessEffect):
    """Stopped by a signal as a debugger stops it, and let go again by somebody else."""

    seconds: float

    def happen(self) -> None:
        waker = f"(sleep {self.seconds}; kill -CONT {os.getpid()}) >/dev/null 2>&1 &"
        subprocess.run(["sh", "-c", waker], check=True)
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class HoldInterpreter(ProcessEffect):
    """No other thread of the process runs meanwhile: a foreign function that keeps the interpreter's lock."""

    seconds: float

    def happen(self) -> None:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(self.seconds * 1e6)))
