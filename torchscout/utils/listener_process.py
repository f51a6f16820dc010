"""Runs a listener in its own process, so that the trainer itself is not reachable over the network."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import ExitStack, suppress

from torchscout.utils.child_process import command
from torchscout.utils.listener import Address

__all__ = ["ListenerProcess"]

_START_SECONDS = 30.0
_MOST_RESTARTS = 3


class ListenerProcess:
    """A listener process, which ends with ``close`` or with this process."""

    def __init__(self, address: Address, inner: str) -> None:
        """``inner`` is the abstract name of the socket to relay to; raises ``OSError`` if it cannot
        listen."""
        self._host, self._inner = address[0], inner
        self.restarts = 0
        self.port = address[1]
        self._process = self._start()

    def restart_if_ended(self) -> str | None:
        """Start the process again if it has ended, a few times; return what happened, None if it runs."""
        if self._process.poll() is None or self.restarts >= _MOST_RESTARTS:
            return None
        self.restarts += 1
        self._drop()
        try:
            self._process = self._start()
        except OSError as error:
            return f"the process that receives copies of other ranks ended and cannot be restarted: {error}"
        return "the process that receives copies of other ranks ended and was restarted"

    def close(self) -> None:
        self._drop()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(1.0)

    def _drop(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = (self._host, str(self.port), self._inner, str(os.getpid()))
        process = subprocess.Popen(
            command("torchscout.utils.listener", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        with ExitStack() as undo:
            undo.enter_context(process)  # closes its pipes and waits for it
            undo.callback(process.kill)
            answer = _first_line(process)
            if "problem" in answer:
                raise OSError(answer["problem"])
            undo.pop_all()
        self.port = int(answer["port"])
        return process


def _first_line(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + _START_SECONDS
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise OSError(f"the listener process was not ready after {_START_SECONDS:g} s")
        if not (piece := os.read(process.stdout.fileno(), 4096)):
            raise OSError("the listener process ended at once")
        line += piece
    answer: dict[str, str] = json.loads(line)
    return answer
