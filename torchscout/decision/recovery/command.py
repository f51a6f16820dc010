"""Runs ``RecoveryConfig.on_decision``, a command of the operator, with a decision on its standard input.

A process in between waits for the command and limits its time, so that the worker neither waits for it nor
has to outlive it. It has a session of its own, because a launcher ends a worker with its process group.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchscout.decision.types import Decision
from torchscout.log import PREFIX, log
from torchscout.utils import child_process

__all__ = ["start_command"]

_started: list[subprocess.Popen[bytes]] = []


def start_command(
    command: Sequence[str], seconds: float, decision: Decision, folder: Path | str | None = None
) -> None:
    """Start the command in a folder, by default the current one, and return at once. What goes wrong with it
    is logged, and changes nothing else."""
    _started[:] = [each for each in _started if each.poll() is None]
    try:
        # A file, because writing to a pipe would wait for a command that does not read.
        with tempfile.TemporaryFile() as document:
            document.write(json.dumps(decision.to_json()).encode() + b"\n")
            document.seek(0)
            arguments = (str(seconds), str(folder or Path.cwd()), *command)
            between = subprocess.Popen(
                child_process.command(__name__, *arguments),
                stdin=document,
                stdout=sys.__stderr__,
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        log.warning("on_decision: %s could not be started: %s", command[0], error)
        return
    _started.append(between)


def _wait(seconds: str, folder: str, *command: str) -> None:
    try:
        status = subprocess.run(command, cwd=folder, timeout=float(seconds), check=False).returncode
        problem = f"ended with status {status}" if status else None
    except subprocess.TimeoutExpired:
        problem = f"was ended after {seconds} s"
    except (OSError, ValueError) as error:
        problem = f"could not be started: {error}"
    if problem is not None:
        print(f"{PREFIX} on_decision: {command[0]} {problem}", file=sys.stderr)


if __name__ == "__main__":
    _wait(*sys.argv[3:])  # after what ``child_process.command`` needs itself
