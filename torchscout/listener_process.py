"""A listener in a process of its own: the trainer then has no listener that anybody can reach.

For each connection, that process tells a name that the trainer is to connect to.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import time
from contextlib import suppress
from typing import IO

from torchscout.child_process import command
from torchscout.listener import Address

__all__ = ["ListenerProcess"]

_START_SECONDS = 30.0
_MOST_RESTARTS = 3
_RESTART_SECONDS = 1.0
"""From a restart to the next, at first; later twice as long each time."""


class ListenerProcess:
    """It ends with ``close``, and with this process, however that ends."""

    def __init__(self, address: Address) -> None:
        """``OSError`` if it cannot listen."""
        self._host = address[0]
        self.restarts = 0
        self.port = address[1]
        self.pipe: int | None = None
        """Readable when there are names; None if it has ended."""
        self._rest = b""
        self._next_restart = -math.inf
        self._process = self._start()

    def names(self) -> list[str]:
        """The abstract names of sockets to connect to, for connections that have come since the last call."""
        if self.pipe is None:
            return []
        with suppress(BlockingIOError):
            if not (piece := os.read(self.pipe, 1 << 16)):
                self.pipe = None
            self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line)["name"] for line in lines]

    def restart_if_ended(self) -> str | None:
        """Start it again if it has ended, a few times; what to say of that. Takes about 0.1 s then."""
        now = time.monotonic()
        if self._process.poll() is None or self.restarts >= _MOST_RESTARTS or now < self._next_restart:
            return None
        self._next_restart = now + _RESTART_SECONDS * 2**self.restarts
        self.restarts += 1
        self._drop()
        try:
            self._process = self._start()
        except OSError as error:
            return (
                f"the process that listens for copies of other ranks ended, and cannot start again: {error}"
            )
        return "the process that listens for copies of other ranks ended, and was started again"

    def close(self) -> None:
        self._drop()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(1.0)

    def _drop(self) -> None:
        self.pipe = None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = (self._host, str(self.port), str(os.getpid()))
        process = subprocess.Popen(
            command("torchscout.listener", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            line, _, self._rest = _first_line(process.stdout).partition(b"\n")
            answer = json.loads(line)
            if "problem" in answer:
                raise OSError(answer["problem"])
        except OSError:
            process.kill()
            process.wait()
            raise
        self.port = int(answer["port"])
        self.pipe = process.stdout.fileno()
        os.set_blocking(self.pipe, False)
        return process


def _first_line(pipe: IO[bytes]) -> bytes:
    """With what came along."""
    line, deadline = b"", time.monotonic() + _START_SECONDS
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while b"\n" not in line:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise OSError(f"its process is not ready after {_START_SECONDS:g} s")
        if not (piece := os.read(pipe.fileno(), 4096)):
            raise OSError("its process ended at once")
        line += piece
    return line
