"""The time between two updates, in which tensors must not change, and how much can be signed in it.

Used by ``owned_state``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from torchscout.c3.signature import PendingSignatures, SignaturePlan, read_signatures
from torchscout.decision.types import Surface
from torchscout.state.table import Row

__all__ = ["Pace", "Window"]

_BYTES_PER_SECOND = 1e12
"""A lower bound for an accelerator; its time is not measured, because that would synchronize with it."""


class Window:
    """The time from one update to the next."""

    def __init__(
        self,
        step: int,
        rows: Mapping[Surface, Row],
        plan: SignaturePlan,
        total: int,
        *,
        are_copies: bool = False,
    ) -> None:
        """Watch these rows, which ``plan`` signs, from the update of this step on. ``total`` has the bytes of
        everything to be watched, in this window or another. See ``working_copies`` for ``are_copies``."""
        self.step, self.are_copies = step, are_copies
        self.written: frozenset[Surface] = frozenset()
        """What training is known to have written to, or has moved to other memory."""
        self.received: frozenset[Surface] = frozenset()
        """What a collective may have written to."""
        self.sizes = {name: row.bytes for name, row in rows.items()}
        """Bytes of each watched tensor."""
        self._total = total
        self._rows, self._plan = rows, plan
        self._versions = [_versions(row) for row in rows.values()]
        self._before = plan.start()
        self._after: tuple[list[Surface], PendingSignatures] | None = None

    @property
    def tensors(self) -> dict[Surface, torch.Tensor]:
        """What is watched; empty once the window is closed."""
        return {name: row.local for name, row in self._rows.items()}

    def close(self, received: frozenset[Surface] = frozenset()) -> None:
        """Called when the next update begins. A collective may have written to ``received``."""
        kept = [name for name, row in self._rows.items() if row.is_current]
        is_whole = len(kept) == len(self._rows)
        after = self._plan.start() if is_whole else PendingSignatures(self._rows[each].local for each in kept)
        self._after = kept, after
        counted = zip(self._rows.items(), self._versions, strict=True)
        written = {name for (name, row), before in counted if before != _versions(row)}
        self.written = frozenset(written | (self._rows.keys() - kept))
        self.received = received & self._rows.keys()
        self._rows = {}

    @property
    def watched(self) -> int:
        """Bytes that were watched. Valid once the window is closed."""
        return sum(size for name, size in self.sizes.items() if name not in self.written)

    @property
    def demanded(self) -> int:
        """Bytes that must be watched for a check to certify. Valid once the window is closed."""
        if not self.are_copies:
            return self._total
        return self._total - sum(size for name, size in self.sizes.items() if name in self.written)

    def changed(self) -> list[Surface]:
        """Return what has changed. Valid once the window is closed."""
        assert self._after is not None, "close comes first"
        kept, pending = self._after
        before, after = read_signatures([self._before, pending])
        was = dict(zip(self.sizes, before, strict=True))
        found = zip(kept, after, strict=True)
        return [name for name, now in found if was[name] != now and name not in self.written]


def _versions(row: Row) -> tuple[int, int]:
    """DTensors count their own writes."""
    return row.local._version, row.tensor._version


class Pace:
    """How long signing and steps take, as measured on the host."""

    def __init__(self) -> None:
        self._seconds_per_byte: float | None = None
        self._step_seconds: float | None = None
        self._ended: float | None = None

    def step_ended(self) -> None:
        now = time.perf_counter()
        if self._ended is not None:
            self._step_seconds = _mixed(self._step_seconds, now - self._ended)
        self._ended = now

    def signed(self, size: int, seconds: float) -> None:
        if size:
            pace = seconds / size + 1 / _BYTES_PER_SECOND
            self._seconds_per_byte = _mixed(self._seconds_per_byte, pace)

    def bytes_within(self, budget: float | None) -> int | None:
        """Return how much may be signed twice in a step; None if it is not limited, or not known yet."""
        if budget is None or self._seconds_per_byte is None or self._step_seconds is None:
            return None
        return int(budget * self._step_seconds / self._seconds_per_byte / 2)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
