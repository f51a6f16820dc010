"""The log of torchscout: one logger, one prefix, and one line for each message.

A program that sets up no logging sees messages from INFO on, on standard error. Any other program decides for
itself, as with every logger: ``logging.getLogger("torchscout").setLevel(logging.WARNING)``.
"""

from __future__ import annotations

import logging
import re
import sys

__all__ = ["PREFIX", "kind_of", "log", "show_by_default"]

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
    """Let messages be seen in a program that has set up no logging; again is no mistake."""
    if not log.hasHandlers():
        log.addHandler(_WithoutSetup())
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)


def kind_of(message: str) -> str:
    """The same for messages that differ in numbers only, such as the step: one of them is enough."""
    return re.sub(r"\d+", "", message)


log.addFilter(_OneLine())
