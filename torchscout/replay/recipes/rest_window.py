"""The time between two updates, in which tensors must not change, and how much can be signed in it.

Used by ``owned_state``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torchscout.c3.signature import PendingSignatures, read_signatures
from torchscout.decision.types import Surface

__all__ = ["Pace", "Window", "size_of"]

_BYTES_PER_SECOND = 1e12
"""A lower bound for an accelerator; its time is not measured, because that would synchronize with it."""


@dataclass
class Window:
    """The time from one update to the next."""

    step: int
    """The step of the first update."""
    tensors: dict[Surface, torch.Tensor]
    """What is watched; released when the window closes."""
    wholes: dict[Surface, torch.Tensor]
    """The DTensors that these are local parts of, else the same tensors: DTensors count their own writes."""
    before: PendingSignatures
    total: int
    """Bytes of everything to be watched, in this window or another."""
    are_copies: bool = False
    """Whether these are working copies: see ``working_copies``."""
    sizes: Mapping[Surface, int] = field(default_factory=dict)
    """Bytes of each watched tensor."""
    after: PendingSignatures | None = None
    written: frozenset[Surface] = frozenset()
    """What training is known to have written to."""
    received: frozenset[Surface] = frozenset()
    """What a collective may have written to."""

    def __post_init__(self) -> None:
        self._versions = self._counted()

    def close(self, received: frozenset[Surface] = frozenset()) -> None:
        """Called when the next update begins. A collective may have written to ``received``."""
        self.after = PendingSignatures(self.tensors.values())
        counted = zip(self.tensors, self._versions, self._counted(), strict=True)
        self.written = frozenset(name for name, before, now in counted if before != now)
        self.received = received & self.tensors.keys()
        self.sizes = {name: size_of(each) for name, each in self.tensors.items()}
        self.tensors, self.wholes = {}, {}

    @property
    def watched(self) -> int:
        """Bytes that were watched. Valid once the window is closed."""
        return sum(size for name, size in self.sizes.items() if name not in self.written)

    @property
    def demanded(self) -> int:
        """Bytes that must be watched for a check to certify. Valid once the window is closed."""
        if not self.are_copies:
            return self.total
        return self.total - sum(size for name, size in self.sizes.items() if name in self.written)

    def changed(self) -> list[Surface]:
        """Return what has changed. Valid once the window is closed."""
        assert self.after is not None, "close comes first"
        before, after = read_signatures([self.before, self.after])
        found = zip(self.sizes, before, after, strict=True)
        return [name for name, old, new in found if old != new and name not in self.written]

    def _counted(self) -> list[tuple[int, int, int]]:
        """Return versions, and addresses of working copies: ZeRO 3 gathers a parameter into other memory."""
        wholes, are_copies = self.wholes, self.are_copies
        return [
            (each._version, wholes[name]._version, wholes[name].data_ptr() if are_copies else 0)
            for name, each in self.tensors.items()
        ]


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


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
