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

from torchscout.collectives.call import POINT_TO_POINT, Call
from torchscout.collectives.interceptor import Handle, Pending, listen

__all__ = ["SEND", "Heard", "Link", "agreed"]

SEND = "send"
"""What passes from one rank to another, whichever of them is asked."""
_ALIKE = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
"""Operations that can be repeated without knowing who sent what; others are taken for the first."""


class Link(NamedTuple):
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
        self._groups: dict[Link, weakref.ref[dist.ProcessGroup]] = {}
        self._handle: Handle | None = None

    def listen(self) -> None:
        if self._handle is None:
            self._groups.clear()
            self._handle = listen(self)

    def rest(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def links(self) -> dict[Link, dist.ProcessGroup]:
        """Those that are still there."""
        alive = {link: group() for link, group in self._groups.items()}
        return {link: group for link, group in alive.items() if group is not None}

    def before(self, call: Call) -> None:
        link = _link_of(call)
        if link is not None and link not in self._groups and _is_on(self._device, call):
            self._groups[link] = weakref.ref(call.process_group)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """Who is asked is known before."""


def _is_on(device: torch.device, call: Call) -> bool:
    return any(tensor.device.type == device.type for tensor in call.tensors)


def _link_of(call: Call) -> Link | None:
    group = call.group
    if group.members is None or group.size == 1 or group.is_scouts or call.operation == "barrier":
        return None
    if call.operation not in POINT_TO_POINT:
        operation = call.operation if call.operation in _ALIKE else _ALIKE[0]
        return Link(operation, tuple(sorted(group.members)), group.name)
    if call.peer is None:  # from whoever sends first
        return None
    ends = sorted((group.members[group.rank], group.members[call.peer]))
    return Link(SEND, tuple(ends), group.name)


def agreed(links: Iterable[Link], told: Sequence[Collection[Sequence[Any]]]) -> list[Link]:
    """Those of this rank's links that all their members have heard, in an order that is the job's.

    ``told`` has what every rank tells of its own.
    """
    counted = Counter(_key(each) for one in told for each in one)
    return sorted(link for link in links if counted[_key(link.told())] == len(link.members))


def _key(told: Sequence[Any]) -> tuple[str, tuple[int, ...], str]:
    operation, members, group = told
    return operation, tuple(members), group
