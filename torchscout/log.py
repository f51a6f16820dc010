"""The log of torchscout: one logger, one prefix, and one line for each message.

A program that does not configure logging sees messages from INFO on, on standard error. Any other program
configures this logger as usual: ``logging.getLogger("torchscout").setLevel(logging.WARNING)``.
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
    """Adds the prefix to a message and joins its lines. Tracebacks are shown at level DEBUG only."""

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
    """Writes to standard error until the program configures logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # programs and tests may have replaced it
            super().emit(record)


def show_by_default() -> None:
    """Show messages in a program that has not configured logging. Idempotent."""
    if not log.hasHandlers():
        log.addHandler(_WithoutSetup())
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)


class Problems:
    """The most recent problems of one part of torchscout, without duplicates.

    A problem is logged unless an earlier one differs in numbers only: a disk that is full at every step must
    not fill the log.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._last: deque[str] = deque(maxlen=20)

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def add(self, problems: Iterable[str], *, are_logged: bool = False) -> None:
        """Keep these problems, and log them unless they ``are_logged`` already."""
        for each in problems:
            if each not in self._last:
                if not are_logged and _kind(each) not in map(_kind, self._last):
                    log.warning("%s: %s", self._part, each)
                self._last.append(each)


def _kind(problem: str) -> str:
    return re.sub(r"\d+", "", problem)


log.addFilter(_OneLine())
