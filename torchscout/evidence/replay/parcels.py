"""Scratch data for one transfer, and what must arrive (paper, section 6.2).

Every place in a group marks what it sends, and all else is the same everywhere: so what each receives follows
from the group alone. Made of small whole numbers, which float32 adds up exactly, in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchscout.evidence.replay.heard import SEND, Link
from torchscout.evidence.replay.reduction import reduce_scatter

__all__ = ["Parcel", "Room"]

_ELEMENTS = {"cuda": 1 << 22}
"""As much as a bucket of gradients, where links are fast: a slow one must show against the clock's noise."""
_FEW_ELEMENTS = 1 << 16
_MARKS = 16

# Renamed in PyTorch 2.13, where the former name warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Parcel(NamedTuple):
    """One transfer, ready to go."""

    go: Callable[[], object]
    got: torch.Tensor
    """What has arrived, once it went."""
    right: torch.Tensor


class Room:
    """Memory for one parcel at a time, all of which is there before the first of them goes."""

    def __init__(self, device: torch.device) -> None:
        self.elements = _ELEMENTS.get(device.type, _FEW_ELEMENTS)
        places = torch.arange(self.elements, dtype=torch.int64, device=device)
        self._pattern = ((places * 197 + 1) & 0xFF).to(torch.float32)
        self._given, self._got, self._right = (torch.empty_like(self._pattern) for _ in range(3))

    def parcel(self, link: Link, group: dist.ProcessGroup) -> Parcel:
        """The one before it must have arrived."""
        pack = {
            "all_reduce": self._to_be_added,
            "all_gather": self._to_be_gathered,
            "all_to_all": self._to_be_exchanged,
            "reduce_scatter": self._to_be_scattered,
        }
        self._got.zero_()
        if link.operation == SEND:
            return self._to_be_swapped(link, group)
        place = dist.get_rank(group)
        torch.add(self._pattern, _mark(place), out=self._given)
        return pack[link.operation](group, place, len(link.members))

    def _to_be_added(self, group: dist.ProcessGroup, place: int, size: int) -> Parcel:  # noqa: ARG002
        self._got.copy_(self._given)
        return Parcel(partial(dist.all_reduce, self._got, group=group), self._got, self._sum(size))

    def _to_be_gathered(self, group: dist.ProcessGroup, place: int, size: int) -> Parcel:  # noqa: ARG002
        part = self.elements // size
        got, right = self._got[: size * part], self._right[: size * part]
        for sender in range(size):
            torch.add(self._pattern[:part], _mark(sender), out=right[sender * part : (sender + 1) * part])
        return Parcel(partial(_all_gather, got, self._given[:part], group=group), got, right)

    def _to_be_exchanged(self, group: dist.ProcessGroup, place: int, size: int) -> Parcel:
        """As much to everybody."""
        part = self.elements // size
        given, got, right = (each[: size * part] for each in (self._given, self._got, self._right))
        own = self._pattern[place * part : (place + 1) * part]
        for sender in range(size):
            torch.add(own, _mark(sender), out=right[sender * part : (sender + 1) * part])
        return Parcel(partial(dist.all_to_all_single, got, given, group=group), got, right)

    def _to_be_scattered(self, group: dist.ProcessGroup, place: int, size: int) -> Parcel:
        part = self.elements // size
        got = self._got[:part]
        right = self._sum(size)[place * part : (place + 1) * part]
        return Parcel(partial(reduce_scatter, got, self._given[: size * part], group=group), got, right)

    def _to_be_swapped(self, link: Link, group: dist.ProcessGroup) -> Parcel:
        place = link.members.index(dist.get_rank())
        other = link.members[1 - place]
        torch.add(self._pattern, _mark(place), out=self._given)
        right = torch.add(self._pattern, _mark(1 - place), out=self._right)
        return Parcel(partial(_swap, self._given, self._got, other, group), self._got, right)

    def _sum(self, size: int) -> torch.Tensor:
        torch.mul(self._pattern, size, out=self._right)
        return self._right.add_(sum(map(_mark, range(size))))


def _mark(place: int) -> int:
    return place % _MARKS


def _swap(given: torch.Tensor, got: torch.Tensor, other: int, group: dist.ProcessGroup) -> None:
    sent, received = dist.P2POp(dist.isend, given, other, group), dist.P2POp(dist.irecv, got, other, group)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
