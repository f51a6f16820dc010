"""The trainer's end of its observer: start it, configure it, let it go (paper, section 7). Torch-free.

Nothing here waits for the observer beyond a given time, whatever happened to it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from torchscout.config import ObserverConfig
from torchscout.errors import ObserverError
from torchscout.evidence.observer.assignment import Assignment

__all__ = ["Observer", "launch"]

_MODULE = "torchscout.evidence.observer.process"
_LOG_CHARACTERS = 2000


def launch(assignment: Assignment, *, timeout: float = 30.0) -> Observer:
    """Start an observer and wait until it is ready; an ``ObserverError`` says why it is not."""
    assignment.log.parent.mkdir(parents=True, exist_ok=True)
    home = str(Path(__file__).parents[3])  # where this very package was imported from
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    with assignment.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            cwd="/",  # no module of the user's may stand in for one of ours
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    observer = Observer(process, assignment)
    try:
        observer.start(timeout)
    except ObserverError:
        process.kill()
        observer.close()
        raise
    return observer


class Observer:
    """A handle. It may be dropped at any time: the observer looks after itself."""

    def __init__(self, process: subprocess.Popen[bytes], assignment: Assignment) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.port: int | None = None
        """Where the hub listens that this observer hosts; None where it hosts none."""
        self._process = process
        self._assignment = assignment
        self._config = assignment.config
        self._input, self._output = process.stdin, process.stdout
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def config(self) -> ObserverConfig:
        """The settings, as last changed."""
        return self._config

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def start(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._write(self._assignment.to_json(), deadline)
        ready = self._read(deadline)
        self.port = ready["port"]

    def configure(self, hubs: Sequence[tuple[str, int]], *, timeout: float = 1.0) -> None:
        """Tell it where the hub and its standby listen, in the order of ``hub_ranks``. Once."""
        self._write({"hubs": [list(address) for address in hubs]}, time.monotonic() + timeout)

    def change(self, *, timeout: float = 1.0, **settings: Any) -> None:
        """Change fields of the ``ObserverConfig`` while it runs."""
        config = replace(self._config, **settings)  # refuses what is not valid
        self._write({"config": settings}, time.monotonic() + timeout)
        self._config = config

    def status(self, *, timeout: float = 1.0) -> Mapping[str, Any]:
        """How it sees its trainer now: silence, threshold, rounds, messages exchanged so far."""
        deadline = time.monotonic() + timeout
        self._write({"status": True}, deadline)
        return self._read(deadline)

    def close(self, *, timeout: float = 1.0) -> None:
        """Let it go. It leaves by itself, at once or, with a hub, after the others; again is no mistake."""
        if self._input.closed:
            return
        with suppress(ObserverError):
            self._write({"close": True}, time.monotonic() + timeout)
        self._input.close()
        self._output.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def _write(self, line: Mapping[str, Any], deadline: float) -> None:
        rest = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while rest:
                if not _is_ready(self._input, select.POLLOUT, deadline):
                    raise self._error("takes no message")
                # A pipe that is writable takes this much at once: a stopped observer stops nobody.
                rest = rest[os.write(self._input.fileno(), rest[: select.PIPE_BUF]) :]
        except OSError as error:
            raise self._error("is gone") from error

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._rest:
            if not _is_ready(self._output, select.POLLIN, deadline):
                raise self._error("does not answer")
            chunk = os.read(self._output.fileno(), 1 << 16)
            if not chunk:
                raise self._error("is gone")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _error(self, state: str) -> ObserverError:
        with suppress(OSError):
            state += (
                f"; its log ends: {self._assignment.log.read_text()[-_LOG_CHARACTERS:].strip() or '(empty)'}"
            )
        return ObserverError(f"the observer of rank {self._assignment.rank} {state}")


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Whether it can be read or written before then, or is closed on the other side.

    Not by ``select``: a rank of a large job has more open files than that can look at.
    """
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
