"""The log of torchscout: one logger, one prefix, and one line for each message.

A program that sets up no logging sees messages from INFO on, on standard error. Any other program decides for
itself, as with every logger: ``logging.getLogger("torchscout").setLevel(logging.WARNING)``.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator

__all__ = ["PREFIX", "Problems", "log", "show_by_default"]

PREFIX = "torchscout:"
log = logging.getLogger("torchscout")


class _OneLine(logging.Filter):
    """Puts the prefix before a message and joins its lines. Tracebacks are kept only at level DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = " ".join(record.getMessage().split())
        if record.exc_info and not log.isEnabledFor(logging.DEBUG):
            kind, error, _ = record.exc_info
            message += f": {'' if kind is None else kind.__name__}: {' '.join(str(error).split())}"
            record.exc_info = None
        record.msg = message if message.startswith(PREFIX) else f"{PREFIX} {message}"
        record.args = ()
        return True


class _WithoutSetup(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error, until the program sets up logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # what it is by now: programs and tests replace it
            super().emit(record)


def show_by_default() -> None:
    """Let messages be seen in a program that has set up no logging; idempotent."""
    if not log.hasHandlers():
        log.addHandler(_WithoutSetup())
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)


class Problems:
    """The last problems of one part of torchscout, each once.

    They are logged, unless one of those before differs in numbers only: a disk that is full at every step
    must not fill the log.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._last: deque[str] = deque(maxlen=20)

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def add(self, problems: Iterable[str]) -> None:
        for each in problems:
            if each not in self._last:
                if _kind(each) not in map(_kind, self._last):
                    log.warning("%s: %s", self._part, each)
                self._last.append(each)


def _kind(problem: str) -> str:
    return re.sub(r"\d+", "", problem)


log.addFilter(_OneLine())
