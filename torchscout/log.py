"""The log of torchscout: one logger, one prefix with the rank, and one line for each message.

A program that does not configure logging sees messages from INFO on, with the time, on standard error. Any
other program configures this logger as usual: ``logging.getLogger("torchscout").setLevel(logging.WARNING)``.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator

__all__ = ["PREFIX", "Problems", "log", "set_rank", "show_by_default", "timed"]

PREFIX = "torchscout:"
_TIME = "%Y-%m-%d %H:%M:%S"
_rank: int | None = None
log = logging.getLogger("torchscout")


class _OneLine(logging.Filter):
    """Adds the prefix to a message and joins its lines. Tracebacks are shown at level DEBUG only."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = " ".join(record.getMessage().split())
        if record.exc_info and not log.isEnabledFor(logging.DEBUG):
            kind, error, _ = record.exc_info
            message += f": {'' if kind is None else kind.__name__}: {' '.join(str(error).split())}"
            record.exc_info = None
        prefix = PREFIX if _rank is None else f"{PREFIX} rank {_rank}:"
        record.msg = message if message.startswith(PREFIX) else f"{prefix} {message}"
        record.args = ()
        return True


class _WithoutSetup(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error until the program configures logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # programs and tests may have replaced it
            super().emit(record)


def set_rank(rank: int) -> None:
    """Show this rank in every line of this process from now on."""
    global _rank  # noqa: PLW0603  as logging itself, which belongs to the process
    _rank = rank


def timed(message: str) -> str:
    """Return a line as the log shows it, for processes that have no log."""
    return f"{time.strftime(_TIME)} {PREFIX} {message}"


def show_by_default() -> None:
    """Show messages in a program that has not configured logging. Idempotent."""
    if not log.hasHandlers():
        handler = _WithoutSetup()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", _TIME))
        log.addHandler(handler)
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
