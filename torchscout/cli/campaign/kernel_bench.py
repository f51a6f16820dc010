"""Runs cells of the expert kernel, each in a process of its own.

Triton decides when it is imported whether its interpreter runs a kernel, so that nothing of it may be in the
campaign's own process.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import Flaw, Grade
from torchscout.cli.campaign.result import Result, found_in

__all__ = ["run_kernel"]

_SECONDS = 600.0
_REASON_CHARACTERS = 600


def run_kernel(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """One after another; the evidence of those that fail stays in ``folder``."""
    for cell in cells:
        begin = time.monotonic()
        try:
            yield _run(cell, folder / cell.name)
        except (subprocess.SubprocessError, ValueError) as error:
            grade = Grade(Flaw.BROKEN, f"its process failed: {_told(error)}")
            took = time.monotonic() - begin
            yield found_in(cell, grade, [], happened=None, took_seconds=took)


def _run(cell: Cell, place: Path) -> Result:
    """On CUDA the kernel is compiled. CPU ranks have no device; without ranks one is used if it is there."""
    is_on_cpu = cell.place.device == "cpu"
    is_interpreted = is_on_cpu and (bool(cell.faults) or not torch.cuda.is_available())
    done = subprocess.run(
        [sys.executable, "-m", "torchscout.cli.campaign.kernel_process", place],
        input=pickle.dumps(cell),
        capture_output=True,
        check=True,
        timeout=_SECONDS,
        env=os.environ | ({"TRITON_INTERPRET": "1"} if is_interpreted else {}),
    )
    return Result.from_json(json.loads(done.stdout))


def _told(error: Exception) -> str:
    written = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else ""
    return (written.splitlines()[-1] if written else str(error))[:_REASON_CHARACTERS]
