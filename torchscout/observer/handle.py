"""Starts and controls an observer process.

Every call returns or raises within its timeout, even if the observer is stopped or dead. This module does not
import torch.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from torchscout.errors import ObserverError
from torchscout.observer.spec import ObserverSpec
from torchscout.utils.child_process import HOME, command
from torchscout.utils.private_files import make_folders, open_file

__all__ = ["ObserverHandle", "launch"]

_MODULE = "torchscout.observer.process"
_LOG_CHARACTERS = 2000
_MAX_RESTARTS = 3
_RESTART_SECONDS = 1.0
"""Delay before the first restart; it doubles each time."""
_RESTART_TIMEOUT_SECONDS = 30.0


def launch(spec: ObserverSpec, *, timeout: float = 30.0, home: Path = HOME) -> ObserverHandle:
    """Start an observer and wait until it is ready; raises ``ObserverError`` if it is not in time."""
    observer = ObserverHandle(_start_process(spec, home), spec, home)
    try:
        observer.start(timeout)
    except ObserverError:
        observer.kill()
        observer.close()
        raise
    return observer


def _start_process(spec: ObserverSpec, home: Path) -> subprocess.Popen[bytes]:
    with _open_log(spec) as errors:
        return subprocess.Popen(
            command(_MODULE, home=home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            cwd="/",
            start_new_session=True,
            pass_fds=[] if spec.output is None else [spec.output],
        )


def _open_log(spec: ObserverSpec) -> IO[bytes]:
    """Open the file for the observer's errors, or ``/dev/null`` if the run directory is not writable."""
    try:
        make_folders(spec.log.parent)
        return os.fdopen(open_file(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    except OSError:
        return Path(os.devnull).open("ab")


class ObserverHandle:
    """Controls an observer process. It may be dropped at any time: the process ends by itself."""

    def __init__(self, process: subprocess.Popen[bytes], spec: ObserverSpec, home: Path = HOME) -> None:
        self.restarts = 0
        self.is_lost = False
        """Whether it has ended for good."""
        self.port: int | None = None
        """The port of the hub that this observer hosts, or will open once it is elected; None if it hosts
        none."""
        self.config = spec.config
        """The settings, as last changed."""
        self._spec, self._home = spec, home
        self._hubs: Sequence[tuple[str, int]] | None = None
        self._copied: Sequence[int] = ()
        self._metrics: Mapping[str, Any] | None = None
        self._questions = 0
        self._closing = False
        self._lock = threading.RLock()
        """Held while its pipes are used, because it may be restarted meanwhile."""
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
    def is_running(self) -> bool:
        return self._process.poll() is None

    def start(self, timeout: float) -> None:
        """Send the spec and wait for the answer; raises ``ObserverError``."""
        deadline = time.monotonic() + timeout
        self._write(self._spec.to_json(), deadline)
        self.port = self._read(deadline)["port"]

    def configure(
        self, hubs: Sequence[tuple[str, int]], *, copied: Sequence[int] = (), timeout: float = 1.0
    ) -> None:
        """Send the addresses of all hubs, in the order of ``hub_ranks``. Call it once.

        ``copied`` are the positions of hubs whose news this observer records, too.
        """
        deadline = time.monotonic() + timeout
        with self._held(deadline):
            line = {"hubs": [list(address) for address in hubs], "copied": list(copied)}
            self._write(line, deadline)
            self._hubs, self._copied = hubs, copied

    def keep_alive(self, lost: Callable[[ObserverError], object] = lambda _: None) -> None:
        """From now on restart the observer if it ends before it is closed, a few times; then call ``lost``.

        Its hub listens at the same port again, so the other observers reconnect by themselves.
        """
        threading.Thread(
            target=self._keep_alive, args=(lost,), name="torchscout-observer", daemon=True
        ).start()

    def _keep_alive(self, lost: Callable[[ObserverError], object]) -> None:
        while True:
            self._process.wait()
            if self._closing:
                return
            if self.restarts == _MAX_RESTARTS:
                times = f"ended {self.restarts + 1} times; this rank is not watched for hangs any more"
                self.is_lost = True
                lost(self._error(times))
                return
            time.sleep(_RESTART_SECONDS * 2**self.restarts)
            self.restarts += 1
            with suppress(ObserverError, OSError):
                self._restart()

    def _restart(self) -> None:
        with self._lock:
            if self._closing:
                return
            place = self._spec.hub
            port = 0 if self.port is None or place is None else self.port - place
            config = replace(self.config, port=port or self.config.port)
            self._spec = replace(self._spec, config=config, is_restarted=True)
            self._input.close()
            self._output.close()
            self._attach(_start_process(self._spec, self._home))
            self.start(_RESTART_TIMEOUT_SECONDS)
            if self._hubs is not None:
                self.configure(self._hubs, copied=self._copied)
            if self._metrics is not None:
                self.leave_metrics(self._metrics)

    def let_go(self) -> None:
        """Do not start it again: this process ends, and its observer leaves once it is known why."""
        self._closing = True

    def kill(self) -> None:
        self._closing = True
        self._process.kill()

    def change(self, *, timeout: float = 1.0, **settings: Any) -> None:
        """Change fields of the ``ObserverConfig`` while it runs; raises ``ValueError`` for an invalid one."""
        config, deadline = replace(self.config, **settings), time.monotonic() + timeout
        with self._held(deadline):
            self._write({"config": settings}, deadline)
            self.config = config

    def leave_metrics(self, document: Mapping[str, Any], *, timeout: float = 1.0) -> None:
        """Have it pass on the last metrics of its trainer once that has died; see ``metrics.final``."""
        deadline = time.monotonic() + timeout
        with self._held(deadline):
            self._metrics = document
            self._write({"metrics": document}, deadline)

    def status(self, *, timeout: float = 1.0) -> Mapping[str, Any]:
        """Return the observer's status: the trainer's silence, its threshold, rounds, messages so far.

        Raises ``ObserverError`` if it does not answer in time.
        """
        deadline = time.monotonic() + timeout
        with self._held(deadline):
            self._questions += 1
            self._write({"status": self._questions}, deadline)
            while (answer := self._read(deadline)).pop("answer", None) != self._questions:
                continue  # a late answer to an earlier question
            return answer

    def close(self, *, timeout: float = 1.0) -> None:
        """Ask it to exit, which it does at once or, if it hosts a hub, after the others. Idempotent."""
        self._closing = True
        if self._input.closed:
            return
        with suppress(ObserverError):
            self._write({"close": True}, time.monotonic() + timeout)
        self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def leave(self) -> None:
        """Close its pipes because this process ends, which it sees by itself. ``close`` then does nothing."""
        self._closing = True
        if not self._input.closed:
            self._input.close()
            self._output.close()

    @contextmanager
    def _held(self, deadline: float) -> Iterator[None]:
        """Hold the lock, which a restart holds for up to 30 s."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._error("is being restarted")
        try:
            yield
        finally:
            self._lock.release()

    def _write(self, line: Mapping[str, Any], deadline: float) -> None:
        rest = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while rest:
                if not _is_ready(self._input, select.POLLOUT, deadline):
                    raise self._error("does not read its input")
                # A writable pipe accepts PIPE_BUF bytes at once, so a stopped observer does not block this.
                rest = rest[os.write(self._input.fileno(), rest[: select.PIPE_BUF]) :]
        except (OSError, ValueError) as error:  # ValueError: the pipe is closed, since a restart failed
            raise self._error("is gone") from error

    def _read(self, deadline: float) -> dict[str, Any]:
        try:
            while b"\n" not in self._rest:
                if not _is_ready(self._output, select.POLLIN, deadline):
                    raise self._error("does not answer")
                chunk = os.read(self._output.fileno(), 1 << 16)
                if not chunk:
                    raise self._error("is gone")
                self._rest += chunk
        except (OSError, ValueError) as error:  # ValueError: the pipe is closed, as by ``leave``
            raise self._error("is gone") from error
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _error(self, state: str) -> ObserverError:
        with suppress(OSError):
            if end := self._spec.log.read_text()[-_LOG_CHARACTERS:].strip():
                state += f"; its log ends: {end}"
        return ObserverError(f"the observer of rank {self._spec.rank} {state}")


def _is_ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Wait until the pipe can be read or written, or its other end is closed; return False at the deadline.

    Not by ``select``, which fails for the large descriptors that a rank of a large job has.
    """
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
