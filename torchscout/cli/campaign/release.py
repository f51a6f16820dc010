"""Stalls that end soon after they are reported: a job that hangs is not waited for longer than need be."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from torchscout.faults.effects import Freeze, Sleep
from torchscout.faults.fault import Fault
from torchscout.faults.plan import FaultPlan

__all__ = ["released"]

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class SleepUntil(Sleep):
    """For ``seconds``, or until there is a report."""

    report: str

    def happen(self) -> None:
        deadline, report = time.monotonic() + self.seconds, Path(self.report)
        while time.monotonic() < deadline and not report.exists():
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class FreezeUntil(Freeze):
    """Stopped for ``seconds``, or until there is a report; let go by somebody else."""

    report: str

    def happen(self) -> None:
        tries = int(self.seconds / _POLL_SECONDS)
        wait = f"for i in $(seq {tries}); do [ -e '{self.report}' ] && break; sleep {_POLL_SECONDS}; done"
        subprocess.run(["sh", "-c", f"({wait}; kill -CONT {os.getpid()}) >/dev/null 2>&1 &"], check=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def released(faults: FaultPlan, report: Path) -> FaultPlan:
    """The same faults; those that only take time are over once ``report`` is there."""
    return FaultPlan(tuple(_released(fault, str(report)) for fault in faults))


def _released(fault: Fault, report: str) -> Fault:
    if type(fault.effect) is Sleep:
        return replace(fault, effect=SleepUntil(fault.effect.seconds, report))
    if type(fault.effect) is Freeze:
        return replace(fault, effect=FreezeUntil(fault.effect.seconds, report))
    return fault
