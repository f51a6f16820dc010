"""Removes the processes and shared memory of a demo or campaign, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchscout.observer.monitor import remove_stale_records
from torchscout.utils.procfs import processes_with

__all__ = ["nothing_left"]

_VARIABLE = "TORCHSCOUT_MEMORY"
_TIMEOUT_SECONDS = 5.0


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Keep in-memory checkpoints in ``folder`` during this block; then remove them and kill its processes."""
    memory = folder / "memory"
    os.environ[_VARIABLE] = str(memory)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        end_processes(f"{_VARIABLE}={memory}")
        shutil.rmtree(memory, ignore_errors=True)
        remove_stale_records()


def end_processes(mark: str) -> None:
    """Kill all processes with ``mark`` in their environment, and wait until they are gone.

    Ranks end with their pipes, but observers have their own sessions and outlive a killed trainer.
    """
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while (marked := list(processes_with(mark))) and time.monotonic() < deadline:
        for process in marked:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
