"""However a long command is told to stop, it stops in the same way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruptible"]


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception, so that it can clear up, once."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # an impatient second one would leave something behind
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
