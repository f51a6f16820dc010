"""The trainer's end of the process that copies shards: starts it, and exchanges lines of JSON with it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import ExitStack, suppress
from typing import IO, Any

from torchscout.checkpoint.storage import shards
from torchscout.errors import CheckpointError
from torchscout.utils.child_process import command
from torchscout.utils.listener import Address

__all__ = ["ReplicaProcess"]

_START_SECONDS = 30.0
_END_SECONDS = 3.0


class ReplicaProcess:
    """A running ``process``; nothing blocks but its start and its end."""

    def __init__(self, setup: dict[str, Any], listens: Address) -> None:
        """Raises ``CheckpointError`` if it cannot listen or does not start, and ``ValueError`` as it does."""
        self._memory: str = setup["memory"]
        self._commands = self._events = b""
        self._process = subprocess.Popen(
            command("torchscout.checkpoint.replication.process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
        )
        with ExitStack() as undo:
            undo.enter_context(self._process)  # closes its pipes and waits for it
            undo.callback(self._process.kill)
            for pipe in (self._stdin, self._stdout):
                os.set_blocking(pipe.fileno(), False)
            self.send({**setup, "listens": list(listens)})
            first = self._first_event()
            if first.get("mistake"):
                raise ValueError(first["error"])
            if "error" in first:
                raise CheckpointError(first["error"])
            undo.pop_all()
        self.port = int(first["port"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def register(self, poll: select.poll) -> None:
        """Wake up when ``exchange`` has something to do."""
        poll.register(self._stdout, select.POLLIN)
        if self._commands:
            poll.register(self._stdin, select.POLLOUT)

    def send(self, command: dict[str, Any]) -> None:
        self._commands += json.dumps(command).encode() + b"\n"
        self._write()

    def exchange(self) -> tuple[list[dict[str, Any]], bool]:
        """Pass on what is left of the commands; return new events, and whether the process has ended."""
        self._write()
        ended = False
        with suppress(BlockingIOError):
            while data := os.read(self._stdout.fileno(), 1 << 16):
                self._events += data
            ended = True
        *lines, self._events = self._events.split(b"\n")
        return [json.loads(line) for line in lines], ended

    def close(self) -> None:
        """End the process, and remove what has arrived in part if it did not do so in time."""
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):
                pipe.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            shards.clean(self._memory)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _write(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            while self._commands:
                self._commands = self._commands[os.write(self._stdin.fileno(), self._commands) :]

    def _first_event(self) -> dict[str, Any]:
        deadline = time.monotonic() + _START_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            self.register(poll)
            poll.poll(1000 * left)
            events, ended = self.exchange()
            if events:
                return events[0]
            if ended:
                raise CheckpointError("the process that copies shards to other machines ended at once")
        raise CheckpointError(f"the process that copies shards was not ready after {_START_SECONDS:g} s")
