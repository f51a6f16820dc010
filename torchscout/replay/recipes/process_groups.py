"""Sends scratch data over every process group that training uses (paper, sections 5.4, 6.1.2 and 7.1).

Communication inside a layer is replayed with the layer. Communication outside of layers is not: gradient
reduction among replicas, transfers between pipeline stages, the shards of an optimizer. So every group that
training used during a step carries the same amount of data, which makes corresponding groups comparable. No
training data is sent.

The result is known in advance: each member adds a mark to a common pattern before it sends. The data are
small integers, which float32 adds exactly in any order.
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

from torchscout.c3.fold import signed
from torchscout.c3.signature import PendingSignatures
from torchscout.collectives.call import POINT_TO_POINT, Call
from torchscout.replay.guard import CallListener, announced
from torchscout.replay.recipe import ABSENT, Comparison, JobExchange, Mode, Observation, Recipe, Replay
from torchscout.replay.sharded_parameters import reduce_scatter
from torchscout.replay.timing import timed_transfer

__all__ = ["SEND", "CommunicationLog", "GroupUse", "ProcessGroupRecipe", "ScratchBuffers", "agreed"]

SEND = "send"
"""Point-to-point traffic, in either direction."""
_SYMMETRIC = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
"""Operations in which all members play the same part; any other one is replayed as the first of these."""


class GroupUse(NamedTuple):
    """An operation that training uses on a process group, or between two of its members."""

    operation: str
    members: tuple[int, ...]
    """Ascending; of ``SEND``, the two ends."""
    group: str
    """Name of the process group."""

    def describe(self) -> list[Any]:
        """Return a JSON description; of a collective, the first member and the number of members."""
        members = self.members if self.operation == SEND else (self.members[0], len(self.members))
        return [self.operation, list(members), self.group]


class CommunicationLog(CallListener):
    """The process groups that this rank's training uses between ``start`` and ``stop``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[GroupUse, weakref.ref[dist.ProcessGroup]] = {}

    def start(self) -> None:
        """Start a new log; does nothing while one is being written."""
        if not self.is_listening:
            self._groups.clear()
            self.listen()

    def groups(self) -> dict[GroupUse, dist.ProcessGroup]:
        """Return the groups that still exist."""
        alive = {use: group() for use, group in self._groups.items()}
        return {use: group for use, group in alive.items() if group is not None}

    def before(self, call: Call) -> None:
        use = _use_in(call)
        is_on_device = any(tensor.device.type == self._device.type for tensor in call.tensors)
        if use is not None and use not in self._groups and is_on_device:
            self._groups[use] = weakref.ref(call.process_group)


def _use_in(call: Call) -> GroupUse | None:
    group = call.group
    if group.members is None or group.size == 1 or group.is_scouts or call.operation == "barrier":
        return None
    if call.operation not in POINT_TO_POINT:
        operation = call.operation if call.operation in _SYMMETRIC else _SYMMETRIC[0]
        return GroupUse(operation, tuple(sorted(group.members)), group.name)
    if call.peer is None:  # receives from any sender
        return None
    ends = sorted((group.members[group.rank], group.members[call.peer]))
    return GroupUse(SEND, tuple(ends), group.name)


def agreed(uses: Iterable[GroupUse], described: Sequence[Collection[Sequence[Any]]]) -> list[GroupUse]:
    """Return those of this rank's uses that all their members have logged, in the same order on every rank.

    ``described`` has the descriptions of every rank's uses.
    """
    counted = Counter(_key(each) for of_rank in described for each in of_rank)
    return sorted(use for use in uses if counted[_key(use.describe())] == len(use.members))


def _key(description: Sequence[Any]) -> tuple[str, tuple[int, ...], str]:
    operation, members, group = description
    return operation, tuple(members), group


_ELEMENTS = {"cuda": 1 << 22}
"""The size of a gradient bucket, where links are fast: a slow link must stand out from the clock's noise."""
_FEW_ELEMENTS = 1 << 16
_MARKS = 16

# Renamed in PyTorch 2.13, where the old name warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ScratchTransfer(NamedTuple):
    """One transfer, ready to run."""

    run: Callable[[], object]
    received: torch.Tensor
    expected: torch.Tensor


class ScratchBuffers:
    """Memory for one transfer at a time, allocated before the first one runs."""

    def __init__(self, device: torch.device) -> None:
        self.elements = _ELEMENTS.get(device.type, _FEW_ELEMENTS)
        places = torch.arange(self.elements, dtype=torch.int64, device=device)
        self._pattern = ((places * 197 + 1) & 0xFF).to(torch.float32)
        self._sent, self._received, self._expected = (torch.empty_like(self._pattern) for _ in range(3))

    def transfer(self, use: GroupUse, group: dist.ProcessGroup) -> ScratchTransfer:
        """Fill the buffers for one transfer; the previous one must have finished."""
        self._received.zero_()
        if use.operation == SEND:
            return self._swap(use, group)
        place, size = dist.get_rank(group), len(use.members)
        torch.add(self._pattern, _mark(place), out=self._sent)
        part = self.elements // size
        own = slice(place * part, (place + 1) * part)
        sent, received = self._sent[: size * part], self._received[: size * part]
        if use.operation == "all_reduce":
            self._received.copy_(self._sent)
            run = partial(dist.all_reduce, self._received, group=group)
            return ScratchTransfer(run, self._received, self._sum(size))
        if use.operation == "all_gather":
            run = partial(_all_gather, received, self._sent[:part], group=group)
            return ScratchTransfer(run, received, self._from_each(self._pattern[:part], size))
        if use.operation == "all_to_all":
            run = partial(dist.all_to_all_single, received, sent, group=group)
            return ScratchTransfer(run, received, self._from_each(self._pattern[own], size))
        run = partial(reduce_scatter, self._received[:part], sent, group=group)
        return ScratchTransfer(run, self._received[:part], self._sum(size)[own])

    def _from_each(self, pattern: torch.Tensor, size: int) -> torch.Tensor:
        """Return the pattern with the mark of each sender, one after the other."""
        expected = self._expected[: size * len(pattern)]
        for sender, part in enumerate(expected.chunk(size)):
            torch.add(pattern, _mark(sender), out=part)
        return expected

    def _sum(self, size: int) -> torch.Tensor:
        torch.mul(self._pattern, size, out=self._expected)
        return self._expected.add_(sum(map(_mark, range(size))))

    def _swap(self, use: GroupUse, group: dist.ProcessGroup) -> ScratchTransfer:
        place = use.members.index(dist.get_rank())
        torch.add(self._pattern, _mark(place), out=self._sent)
        expected = torch.add(self._pattern, _mark(1 - place), out=self._expected)
        run = partial(_swap, self._sent, self._received, use.members[1 - place], group)
        return ScratchTransfer(run, self._received, expected)


def _mark(place: int) -> int:
    return place % _MARKS


def _swap(sent: torch.Tensor, received: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


RECEIVED = "process_groups/received"
_AS_SENT = signed(xxhash.xxh3_64_intdigest(b"torchscout: what was sent has arrived"))
"""In place of a signature: all data arrived unchanged."""


class ProcessGroupRecipe(Recipe):
    """All process groups that training used in the step at whose end it is due."""

    kind = "process_groups"
    targets = ("process_groups",)
    is_required = False

    def __init__(self, job: JobExchange, device: torch.device) -> None:
        self._device, self._log, self._agreement = device, CommunicationLog(device), _Agreement(job)

    def new_replay(self, *_: object) -> _Transfers:
        self._log.start()
        return _Transfers(self._log, self._agreement, self._device)


class _Agreement:
    """Selects uses that all their members have logged: a rank alone in a transfer would wait forever."""

    def __init__(self, job: JobExchange) -> None:
        self._job = job
        self._own: list[GroupUse] | None = None
        self._agreed: list[GroupUse] = []
        self.is_silent = True
        """Whether no rank of the job has logged any communication."""

    def differs(self, uses: Iterable[GroupUse]) -> bool:
        """Whether these are not the uses that the last exchange was about."""
        return sorted(uses) != self._own

    def on(self, uses: Iterable[GroupUse], has_changed: bool) -> list[GroupUse]:
        """Called on every rank of the job; exchanges descriptions only if those of any rank have changed."""
        if has_changed:
            own = sorted(uses)
            described = self._job.exchange([use.describe() for use in own])
            self._own, self._agreed, self.is_silent = own, agreed(own, described), not any(described)
        return self._agreed


class _Transfers(Replay):
    """One transfer for each use of a process group."""

    def __init__(self, log: CommunicationLog, agreement: _Agreement, device: torch.device) -> None:
        self._log, self._agreement, self._device = log, agreement, device
        self._groups: dict[GroupUse, dist.ProcessGroup] = {}
        self._uses: list[GroupUse] = []
        self._buffers: ScratchBuffers | None = None

    def describe(self) -> None:
        self._log.stop()
        self._groups = self._log.groups()
        self._buffers = ScratchBuffers(self._device)

    @property
    def has_news(self) -> bool:
        return self._agreement.differs(self._groups)

    def agree(self, has_news: bool, /) -> None:
        self._uses = self._agreement.on(self._groups, has_news)

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        assert self._buffers is not None, "describe comes first"
        return repr(self._uses), (self._buffers.elements,)

    def comparisons(self) -> list[Comparison]:
        absent = "training did not communicate on this rank"
        received = Comparison(RECEIVED, Mode.FORWARD, absent=absent, expected=_AS_SENT)
        return [] if self._agreement.is_silent else [received]

    def observe(self, seen: Observation) -> None:
        assert self._buffers is not None, "describe comes first"
        pending: list[PendingSignatures] = []
        for use in self._uses:
            transfer = self._buffers.transfer(use, self._groups[use])
            surface = f"time/{ProcessGroupRecipe.kind}_{use.operation}@"
            with (
                timed_transfer(self._device, seen, surface, use.members, self._buffers.elements),
                announced(),
            ):
                transfer.run()
            # Equal numbers have equal bytes here: no value that is sent has two representations, as zero has.
            pending.append(PendingSignatures([transfer.received, transfer.expected]))
        if not pending:
            seen.signatures[RECEIVED] = ABSENT
        for each in pending:
            seen.when_signed(each, partial(_compare, seen))

    def release(self) -> None:
        self._log.stop()
        self._groups, self._uses, self._buffers = {}, [], None


def _compare(seen: Observation, found: list[int]) -> None:
    """Record the signature of wrong data; that of the first wrong transfer is kept."""
    received, expected = found
    before = seen.signatures.get(RECEIVED, _AS_SENT)
    seen.signatures[RECEIVED] = received if received != expected and before == _AS_SENT else before
