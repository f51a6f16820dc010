"""Sends scratch data over every process group that training uses (paper, sections 5.4, 6.1.2 and 7.1).

A layer is replayed with the communication inside of it. Communication outside of layers has no layer to be
replayed with: gradients that replicas add up, what a pipeline stage passes to the next, the shards of an
optimizer. Every group that training was seen to use during a step carries as much as every other, so that
those which correspond can be compared. No data of training is sent.

What must arrive is known: every place in a group marks what it sends, and all else is the same everywhere.
The data are small whole numbers, which float32 adds up exactly, in whatever order.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from torchscout.collectives.call import POINT_TO_POINT, Call
from torchscout.collectives.interceptor import Handle, Pending, listen
from torchscout.decision.fold import signed
from torchscout.decision.signature import PendingSignatures
from torchscout.errors import ReplayError
from torchscout.mesh import LayerKind
from torchscout.replay.capture.broadcast import Broadcast
from torchscout.replay.guard import announced
from torchscout.replay.recipe import ABSENT, Comparison, Given, JobExchange, Mode, Observation
from torchscout.replay.sharded_parameters import reduce_scatter
from torchscout.replay.timing import lapped

__all__ = [
    "SEND",
    "CommunicationLog",
    "GroupUse",
    "ProcessGroupRecipe",
    "ScratchBuffers",
    "ScratchTransfer",
    "agreed",
]

SEND = "send"
"""What passes from one rank to another, whichever of them is asked."""
_ALIKE = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
"""Operations that can be repeated without knowing who sent what; others are taken for the first."""


class GroupUse(NamedTuple):
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


class CommunicationLog:
    """What one rank's training says while it is listened to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[GroupUse, weakref.ref[dist.ProcessGroup]] = {}
        self._handle: Handle | None = None

    def listen(self) -> None:
        if self._handle is None:
            self._groups.clear()
            self._handle = listen(self)

    def rest(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def links(self) -> dict[GroupUse, dist.ProcessGroup]:
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


def _link_of(call: Call) -> GroupUse | None:
    group = call.group
    if group.members is None or group.size == 1 or group.is_scouts or call.operation == "barrier":
        return None
    if call.operation not in POINT_TO_POINT:
        operation = call.operation if call.operation in _ALIKE else _ALIKE[0]
        return GroupUse(operation, tuple(sorted(group.members)), group.name)
    if call.peer is None:  # from whoever sends first
        return None
    ends = sorted((group.members[group.rank], group.members[call.peer]))
    return GroupUse(SEND, tuple(ends), group.name)


def agreed(links: Iterable[GroupUse], told: Sequence[Collection[Sequence[Any]]]) -> list[GroupUse]:
    """Those of this rank's links that all their members have heard, in an order that is the job's.

    ``told`` has what every rank tells of its own.
    """
    counted = Counter(_key(each) for one in told for each in one)
    return sorted(link for link in links if counted[_key(link.told())] == len(link.members))


def _key(told: Sequence[Any]) -> tuple[str, tuple[int, ...], str]:
    operation, members, group = told
    return operation, tuple(members), group


_ELEMENTS = {"cuda": 1 << 22}
"""As much as a bucket of gradients, where links are fast: a slow one must show against the clock's noise."""
_FEW_ELEMENTS = 1 << 16
_MARKS = 16

# Renamed in PyTorch 2.13, where the former name warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ScratchTransfer(NamedTuple):
    """One transfer, ready to go."""

    go: Callable[[], object]
    got: torch.Tensor
    """What has arrived, once it went."""
    right: torch.Tensor


class ScratchBuffers:
    """Memory for one parcel at a time, all of which is there before the first of them goes."""

    def __init__(self, device: torch.device) -> None:
        self.elements = _ELEMENTS.get(device.type, _FEW_ELEMENTS)
        places = torch.arange(self.elements, dtype=torch.int64, device=device)
        self._pattern = ((places * 197 + 1) & 0xFF).to(torch.float32)
        self._given, self._got, self._right = (torch.empty_like(self._pattern) for _ in range(3))

    def parcel(self, link: GroupUse, group: dist.ProcessGroup) -> ScratchTransfer:
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

    def _to_be_added(self, group: dist.ProcessGroup, place: int, size: int) -> ScratchTransfer:  # noqa: ARG002
        self._got.copy_(self._given)
        return ScratchTransfer(partial(dist.all_reduce, self._got, group=group), self._got, self._sum(size))

    def _to_be_gathered(self, group: dist.ProcessGroup, place: int, size: int) -> ScratchTransfer:  # noqa: ARG002
        part = self.elements // size
        got, right = self._got[: size * part], self._right[: size * part]
        for sender in range(size):
            torch.add(self._pattern[:part], _mark(sender), out=right[sender * part : (sender + 1) * part])
        return ScratchTransfer(partial(_all_gather, got, self._given[:part], group=group), got, right)

    def _to_be_exchanged(self, group: dist.ProcessGroup, place: int, size: int) -> ScratchTransfer:
        """As much to everybody."""
        part = self.elements // size
        given, got, right = (each[: size * part] for each in (self._given, self._got, self._right))
        own = self._pattern[place * part : (place + 1) * part]
        for sender in range(size):
            torch.add(own, _mark(sender), out=right[sender * part : (sender + 1) * part])
        return ScratchTransfer(partial(dist.all_to_all_single, got, given, group=group), got, right)

    def _to_be_scattered(self, group: dist.ProcessGroup, place: int, size: int) -> ScratchTransfer:
        part = self.elements // size
        got = self._got[:part]
        right = self._sum(size)[place * part : (place + 1) * part]
        return ScratchTransfer(
            partial(reduce_scatter, got, self._given[: size * part], group=group), got, right
        )

    def _to_be_swapped(self, link: GroupUse, group: dist.ProcessGroup) -> ScratchTransfer:
        place = link.members.index(dist.get_rank())
        other = link.members[1 - place]
        torch.add(self._pattern, _mark(place), out=self._given)
        right = torch.add(self._pattern, _mark(1 - place), out=self._right)
        return ScratchTransfer(partial(_swap, self._given, self._got, other, group), self._got, right)

    def _sum(self, size: int) -> torch.Tensor:
        torch.mul(self._pattern, size, out=self._right)
        return self._right.add_(sum(map(_mark, range(size))))


def _mark(place: int) -> int:
    return place % _MARKS


def _swap(given: torch.Tensor, got: torch.Tensor, other: int, group: dist.ProcessGroup) -> None:
    sent, received = dist.P2POp(dist.isend, given, other, group), dist.P2POp(dist.irecv, got, other, group)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()


RECEIVED = "transfers/received"
_AS_SENT = signed(xxhash.xxh3_64_intdigest(b"torchscout: what was sent has arrived"))
"""In place of a signature: everything arrived as it should."""


class ProcessGroupRecipe:
    """All links that training was heard on in the step at whose end it is due."""

    kind = "transfers"
    targets = ("transfers",)
    role = LayerKind.DENSE
    varies = False
    is_gathered = False
    is_dynamic = False
    is_swept = False
    is_required = False

    def __init__(self, everybody: JobExchange, device: torch.device) -> None:
        self._device, self._heard, self._agreement = device, CommunicationLog(device), _Agreement(everybody)

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> _Transfers:  # noqa: ARG002  all send alike
        self._heard.listen()
        return _Transfers(self._heard, self._agreement, self._device)

    def again(self, target: int, given: Given) -> _Transfers:  # noqa: ARG002  as the protocol has it
        raise ReplayError("training has not communicated yet, and its groups are not known")


class _Agreement:
    """On links that all their members have heard: a rank that waits on one alone would wait for ever."""

    def __init__(self, everybody: JobExchange) -> None:
        self._everybody = everybody
        self._own: list[GroupUse] | None = None
        self._agreed: list[GroupUse] = []
        self.is_silent = True
        """Whether nobody in the job was heard at all."""

    def on(self, links: Sequence[GroupUse]) -> list[GroupUse]:
        """Asked by every rank of the job; all tell each other only where something has changed."""
        own = sorted(links)
        if any(self._everybody.highest([own != self._own])):
            told = self._everybody.exchange([link.told() for link in own])
            self._own, self._agreed, self.is_silent = own, agreed(own, told), not any(told)
        return self._agreed


class _Transfers:
    """One on each link."""

    def __init__(self, heard: CommunicationLog, agreement: _Agreement, device: torch.device) -> None:
        self._heard, self._agreement, self._device = heard, agreement, device
        self._groups: dict[GroupUse, dist.ProcessGroup] = {}
        self._links: list[GroupUse] = []
        self._room: ScratchBuffers | None = None

    def describe(self) -> None:
        self._heard.rest()
        self._groups = self._heard.links()

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:  # noqa: ARG002  nothing is told
        self._room = ScratchBuffers(self._device)

    def align(self, broadcast: Broadcast) -> None:  # noqa: ARG002  the data follow from the place
        self._links = self._agreement.on(list(self._groups))

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        assert self._room is not None, "prepared first"
        return repr(self._links), (self._room.elements,)

    def comparisons(self) -> list[Comparison]:
        alone = "training was not heard to communicate here"
        received = Comparison(RECEIVED, Mode.FORWARD, absent=alone, right=_AS_SENT)
        return [] if self._agreement.is_silent else [received]

    def observe(self, variant: float, seen: Observation) -> None:  # noqa: ARG002  nothing is scaled
        assert self._room is not None, "prepared first"
        pending: list[PendingSignatures] = []
        for link in self._links:
            parcel = self._room.parcel(link, self._groups[link])
            surface = f"time/{ProcessGroupRecipe.kind}_{link.operation}@"
            with lapped(self._device, seen, surface, link.members, self._room.elements), announced():
                parcel.go()
            # Bytes stand for numbers: nothing that is sent has a second form, as zero has.
            pending.append(PendingSignatures([parcel.got, parcel.right]))
        if not pending:
            seen.signatures[RECEIVED] = ABSENT
        for each in pending:
            seen.when_signed(each, partial(_hold_against, seen))

    def invocation(self) -> None:
        """What is sent is no call."""

    def release(self) -> None:
        self._heard.rest()
        self._groups, self._links, self._room = {}, [], None


def _hold_against(seen: Observation, found: list[int]) -> None:
    """Fill in the signature of what is wrong, if anything is; the first that is found stays."""
    got, right = found
    before = seen.signatures.get(RECEIVED, _AS_SENT)
    seen.signatures[RECEIVED] = got if got != right and before == _AS_SENT else before
