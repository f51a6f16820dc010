"""Runs an action on SIGTERM before the process ends (paper, section 9).

A Python signal handler runs only when the main thread returns to the interpreter, which never happens in a
rank that is blocked in a collective. So a thread reads from a pipe, to which the interpreter writes the
signal's number as soon as it arrives (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["before_termination"]

_POLL_SECONDS = 0.05


def before_termination(action: Callable[[], object]) -> Callable[[], None]:
    """Call ``action`` in a thread when SIGTERM arrives, then end the process as SIGTERM does.

    A second SIGTERM ends it at once. Returns a function that undoes this. Does nothing outside of the main
    thread, or if the job has its own handler or wakeup descriptor.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return _nothing
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    if (others := signal.set_wakeup_fd(writer, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(others)
        os.close(reader)
        os.close(writer)
        return _nothing
    waiting = _Waiting(action, reader, writer)
    _waiting.append(waiting)
    signal.signal(signal.SIGTERM, _noticed)
    waiting.thread.start()
    return waiting.undo


class _Waiting:
    """Waits for SIGTERM in a thread."""

    def __init__(self, action: Callable[[], object], reader: int, writer: int) -> None:
        self._action, self._reader, self._writer = action, reader, writer
        self.thread = threading.Thread(target=self.run, name="torchscout-sigterm", daemon=True)

    def run(self) -> None:
        while number := os.read(self._reader, 1):
            if number[0] == signal.SIGTERM:
                self._act()
                _end_process()
        os.close(self._reader)

    def undo(self) -> None:
        """Idempotent."""
        self._action = _nothing
        # Only the main thread can change handlers; otherwise this thread still ends the process on SIGTERM.
        if threading.current_thread() is threading.main_thread() and self in _waiting:
            _waiting.remove(self)
            if signal.getsignal(signal.SIGTERM) is _noticed:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if (current := signal.set_wakeup_fd(-1)) not in (-1, self._writer):
                signal.set_wakeup_fd(current)
            os.close(self._writer)
            self.thread.join(1.0)

    def ensure_notified(self) -> None:
        """Called by the handler: the job may have set another wakeup descriptor since, as asyncio does."""
        current = signal.set_wakeup_fd(-1)
        if current != -1:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        if current != self._writer:
            os.write(self._writer, bytes([signal.SIGTERM]))

    def _act(self) -> None:
        acting = threading.Thread(target=self._action, name="torchscout-last-files", daemon=True)
        acting.start()
        while acting.is_alive():
            again, _, _ = select.select([self._reader], [], [], _POLL_SECONDS)
            if again and os.read(self._reader, 1) == bytes([signal.SIGTERM]):
                return


_waiting: list[_Waiting] = []
"""The current one, if any."""


def _noticed(*_: object) -> None:
    """The signal handler; training continues until the action is done."""
    for each in _waiting:
        each.ensure_notified()


def _nothing() -> None:
    """Do nothing."""


def _end_process() -> None:
    """End the process by SIGTERM. ``signal.signal`` needs the main thread, which may be blocked."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)


def _leave_to_parent() -> None:
    """Restore the default in a forked child, such as a data loader worker."""
    if _waiting and signal.getsignal(signal.SIGTERM) is _noticed:
        _waiting.clear()
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_parent)
