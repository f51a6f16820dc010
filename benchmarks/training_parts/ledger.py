"""Exclusive times: every moment of a measured block is charged to exactly one part."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Key = tuple[str, str]
"""The kind of a recipe, or what is common to all of them, and the part of a check."""


class Ledger:
    """Charges the time since the last change to the innermost open part.

    ``finish_update`` is called at every change: with a device it waits for it, so that the device's time is
    charged to the part that caused it. ``meet`` lets all ranks come before an exchange begins; that is
    ``waiting``.
    """

    def __init__(self, finish_update: Callable[[], None], meet: Callable[[], None]) -> None:
        self._settle, self._meet = finish_update, meet
        self._open: list[Key] = []
        self._since = 0.0
        self.seconds: Counter[Key] = Counter()
        self.calls: Counter[Key] = Counter()
        self.is_exchanging = False

    @contextmanager
    def part(self, name: str, kind: str | None = None) -> Iterator[None]:
        """Charge this block, except for parts within it, to ``name``."""
        before = self._open[-1][0] if self._open else "training"
        key = (kind or before, name)
        self._change()
        self._open.append(key)
        self.calls[key] += 1
        try:
            yield
        finally:
            self._change()
            self._open.pop()

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """A part that communicates; exchanges within it are its own."""
        if self.is_exchanging or not self._open:
            yield
            return
        with self.part("waiting"):
            self._meet()
        self.is_exchanging = True
        try:
            with self.part(name):
                yield
        finally:
            self.is_exchanging = False

    def _change(self) -> None:
        if self._open:
            self._settle()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class Patches:
    """Functions that are replaced until ``undo``; production code has no timers of its own."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def around(self, owner: Any, name: str, block: Callable[..., Any]) -> None:
        """Let every call run inside of ``block(*arguments)``, a context manager."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with block(*args, **kwargs):
                return original(*args, **kwargs)

        self._set(owner, name, call)

    def around_function(self, module: Any, name: str, block: Callable[..., Any]) -> None:
        """The same under every name by which torchscout's modules have imported it."""
        original = getattr(module, name)
        self.around(module, name, block)
        for other in [each for key, each in sys.modules.items() if key.startswith("torchscout.")]:
            if getattr(other, name, None) is original:
                self._set(other, name, getattr(module, name))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)
