"""The trainer's end of its observer: start it, configure it, let it go (paper, section 7). Torch-free.

Nothing here waits for the observer beyond a given time, whatever happened to it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from torchscout.child_process import HOME, command
from torchscout.config import ObserverConfig
from torchscout.errors import ObserverError
from torchscout.evidence.observer.assignment import Assignment
from torchscout.private_files import make_folders, open_file

__all__ = ["Observer", "launch"]

_MODULE = "torchscout.evidence.observer.process"
_LOG_CHARACTERS = 2000
_MOST_RESTARTS = 3
_RESTART_SECONDS = 1.0
"""Until it is started again, the first time; later twice as long each time."""
_RESTART_PATIENCE_SECONDS = 30.0


def launch(assignment: Assignment, *, timeout: float = 30.0, home: Path = HOME) -> Observer:
    """Start an observer and wait until it is ready; an ``ObserverError`` says why it is not."""
    observer = Observer(_started(assignment, home), assignment, home)
    try:
        observer.start(timeout)
    except ObserverError:
        observer.kill()
        observer.close()
        raise
    return observer


def _started(assignment: Assignment, home: Path) -> subprocess.Popen[bytes]:
    with _log_of(assignment) as log:
        return subprocess.Popen(
            command(_MODULE, home=home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )


def _log_of(assignment: Assignment) -> IO[bytes]:
    """Where it writes its own errors; nowhere, if the run directory cannot be written to."""
    try:
        make_folders(assignment.log.parent)
        return os.fdopen(open_file(assignment.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    except OSError:
        return Path(os.devnull).open("ab")


class Observer:
    """A handle. It may be dropped at any time: the observer looks after itself."""

    def __init__(self, process: subprocess.Popen[bytes], assignment: Assignment, home: Path = HOME) -> None:
        self.restarts = 0
        """How often it had to be started again."""
        self.port: int | None = None
        """Where the hub listens that this observer hosts, or will listen once it is elected; None if it hosts
        none."""
        self._assignment, self._home = assignment, home
        self._config = assignment.config
        self._hubs: Sequence[tuple[str, int]] | None = None
        self._asked = 0
        self._closing = False
        self._lock = threading.RLock()
        """Around every use of its pipes: it may be started again meanwhile."""
        self._attach(process)

    def _attach(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._rest = process, b""
        self._input, self._output = process.stdin, process.stdout

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
        """Tell it where hubs listen, or will once they are elected, in the order of ``hub_ranks``. Once."""
        with self._lock:
            self._write({"hubs": [list(address) for address in hubs]}, time.monotonic() + timeout)
            self._hubs = hubs

    def keep_alive(self) -> None:
        """From now on start it again should it end before it is let go, a few times.

        A hub listens where it did before, so that the other observers find it again by themselves.
        """
        threading.Thread(target=self._keep_alive, name="torchscout-observer", daemon=True).start()

    def _keep_alive(self) -> None:
        while self.restarts < _MOST_RESTARTS:
            self._process.wait()
            if self._closing:
                return
            time.sleep(_RESTART_SECONDS * 2**self.restarts)
            self.restarts += 1
            with suppress(ObserverError, OSError):
                self._restart()

    def _restart(self) -> None:
        with self._lock:
            if self._closing:
                return
            place = self._assignment.hub
            port = 0 if self.port is None or place is None else self.port - place
            config = replace(self._config, port=port or self._config.port)
            self._assignment = replace(self._assignment, config=config, is_restarted=True)
            self._input.close()
            self._output.close()
            self._attach(_started(self._assignment, self._home))
            self.start(_RESTART_PATIENCE_SECONDS)
            if self._hubs is not None:
                self.configure(self._hubs)

    def kill(self) -> None:
        self._closing = True
        self._process.kill()

    def change(self, *, timeout: float = 1.0, **settings: Any) -> None:
        """Change fields of the ``ObserverConfig`` while it runs."""
        config = replace(self._config, **settings)  # refuses what is not valid
        with self._lock:
            self._write({"config": settings}, time.monotonic() + timeout)
            self._config = config

    def status(self, *, timeout: float = 1.0) -> Mapping[str, Any]:
        """How it sees its trainer now: silence, threshold, rounds, messages exchanged so far."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise self._error("is being started again")
        try:
            self._asked += 1
            self._write({"status": self._asked}, deadline)
            while (answer := self._read(deadline)).pop("answer", None) != self._asked:
                continue  # it is to an earlier question, whose answer came too late
            return answer
        finally:
            self._lock.release()

    def close(self, *, timeout: float = 1.0) -> None:
        """Let it go. It leaves by itself, at once or, with a hub, after the others; again is no mistake."""
        self._closing = True
        if self._input.closed:
            return
        with suppress(ObserverError):
            self._write({"close": True}, time.monotonic() + timeout)
        self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def leave(self) -> None:
        """This process ends; it sees that for itself, and how. Afterwards ``close`` does nothing."""
        self._closing = True
        if not self._input.closed:
            self._input.close()
            self._output.close()

    def _write(self, line: Mapping[str, Any], deadline: float) -> None:
        rest = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while rest:
                if not _is_ready(self._input, select.POLLOUT, deadline):
                    raise self._error("takes no message")
                # A pipe that is writable takes this much at once: a stopped observer stops nobody.
                rest = rest[os.write(self._input.fileno(), rest[: select.PIPE_BUF]) :]
        except (
            OSError,
            ValueError,
        ) as error:  # the latter if a pipe is closed: it could not be started again
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
