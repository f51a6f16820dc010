"""Over which process groups training communicates, as it is heard during a step (paper, section 7.1).

What a framework's groups are for, and who made them, need not be known: whoever sends something over a group
uses it. SCOUT's own are left out, and what does not travel between the devices that compute.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchscout.evidence.call import Call
from torchscout.evidence.collectives import Handle, Pending, listen

__all__ = ["SEND", "Heard", "Line", "agreed"]

SEND = "send"
"""What passes from one rank to another, whichever of them is asked."""
_ALIKE = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
"""Operations that can be repeated without knowing who sent what; others are taken for the first."""
_POINT_TO_POINT = ("send", "recv")


class Line(NamedTuple):
    """Ranks that communicate, and how."""

    operation: str
    members: tuple[int, ...]
    """Ascending; of a send the two between which it passes."""
    group: str
    """The name of the process group."""

    def told(self) -> list[Any]:
        """As the others are to hear it: of many members the first and how many there are."""
        members = self.members if self.operation == SEND else (self.members[0], len(self.members))
        return [self.operation, list(members), self.group]


class Heard:
    """What one rank's training says while it is listened to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[Line, weakref.ref[dist.ProcessGroup]] = {}
        self._handle: Handle | None = None

    def listen(self) -> None:
        if self._handle is None:
            self._groups.clear()
            self._handle = listen(self)

    def rest(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def lines(self) -> dict[Line, dist.ProcessGroup]:
        """Those that are still there."""
        alive = {line: group() for line, group in self._groups.items()}
        return {line: group for line, group in alive.items() if group is not None}

    def before(self, call: Call) -> None:
        line = _line_of(call)
        if line is not None and line not in self._groups and _is_on(self._device, call):
            self._groups[line] = weakref.ref(call.process_group)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """Who is asked is known before."""


def _is_on(device: torch.device, call: Call) -> bool:
    return any(tensor.device.type == device.type for tensor in call.tensors)


def _line_of(call: Call) -> Line | None:
    group = call.group
    if group.members is None or group.size == 1 or group.is_scouts or call.operation == "barrier":
        return None
    if call.operation not in _POINT_TO_POINT:
        operation = call.operation if call.operation in _ALIKE else _ALIKE[0]
        return Line(operation, tuple(sorted(group.members)), group.name)
    if call.peer is None:  # from whoever sends first
        return None
    ends = sorted((group.members[group.rank], group.members[call.peer]))
    return Line(SEND, tuple(ends), group.name)


def agreed(lines: Iterable[Line], told: Sequence[Collection[Sequence[Any]]]) -> list[Line]:
    """Those of this rank's lines that all their members have heard, in an order that is the job's.

    ``told`` has what every rank tells of its own.
    """
    counted = Counter(_key(each) for one in told for each in one)
    return sorted(line for line in lines if counted[_key(line.told())] == len(line.members))


def _key(told: Sequence[Any]) -> tuple[str, tuple[int, ...], str]:
    operation, members, group = told
    return operation, tuple(members), group
