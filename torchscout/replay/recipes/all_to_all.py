"""Replays the AllToAll among expert-parallel ranks on scratch data (paper, section 6.2).

A plan is a square matrix of row counts: how many rows each place in the group sends to each other.
Corresponding groups of independent replicas carry out the same plan, so that uneven traffic alone makes no
group differ: what arrives must be the same bytes, and take as long. It runs on training's own group, which
is known from the calls that training makes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchscout.collectives.call import Call, Splits
from torchscout.collectives.interceptor import Handle, Pending, listen
from torchscout.errors import ReplayError
from torchscout.mesh import LayerKind
from torchscout.replay.capture.broadcast import Broadcast
from torchscout.replay.guard import announced
from torchscout.replay.recipe import Comparison, Given, Mode, Observation
from torchscout.replay.timing import timed

__all__ = ["CAPTURED", "PLANS", "AllToAllRecipe", "Plan"]

Plan = tuple[tuple[int, ...], ...]
"""Row ``i`` is what the member at place ``i`` sends to each."""

CAPTURED = "captured"
"""As training did it last, on the source's replica."""


def _balanced(members: int, rows: int) -> Plan:
    """Everybody sends as much to everybody."""
    return tuple((max(1, rows // members),) * members for _ in range(members))


def _shifted(members: int, rows: int) -> Plan:
    """A permutation: all that a member has goes to the next one."""
    return tuple(
        tuple(rows if receiver == (sender + 1) % members else 0 for receiver in range(members))
        for sender in range(members)
    )


def _reversed(members: int, rows: int) -> Plan:
    """Another one: the first sends to the last, and the last to the first."""
    return tuple(
        tuple(rows if receiver == members - 1 - sender else 0 for receiver in range(members))
        for sender in range(members)
    )


def _skewed(members: int, rows: int) -> Plan:
    """One expert is popular: each next place gets half as much, and everybody something."""
    shares = [1 << (members - 1 - min(place, 30)) if members <= 31 else 1 for place in range(members)]
    row = tuple(max(1, rows * share // sum(shares)) for share in shares)
    return (row,) * members


def _sparse(members: int, rows: int) -> Plan:
    """Nobody routes anything to every second place."""
    used = (members + 1) // 2
    row = tuple(max(1, rows // used) if receiver % 2 == 0 else 0 for receiver in range(members))
    return (row,) * members


PLANS: dict[str, Callable[[int, int], Plan]] = {
    "balanced": _balanced,
    "shifted": _shifted,
    "reversed": _reversed,
    "skewed": _skewed,
    "sparse": _sparse,
}
"""By name: from the number of members and the rows that one of them has to what is sent."""


ROWS, WIDTH = 64, 64
"""What a member has for each other one by plans that are not training's, and the elements of a row."""


class AllToAllRecipe:
    """Training's own traffic, then plans that broaden it."""

    kind = "all_to_all"
    targets = tuple(f"all_to_all {plan}" for plan in (CAPTURED, *PLANS))
    role = LayerKind.EXPERT
    varies = False
    is_gathered = False
    is_dynamic = True
    is_swept = False
    is_required = False

    def __init__(self, members: tuple[int, ...], device: torch.device) -> None:
        """``members`` hold the experts of one replica, this rank's."""
        self._heard, self._device = _AllToAllListener(members), device

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> AllToAllReplay:  # noqa: ARG002  all know the plan
        self._heard.listen()
        return AllToAllReplay(self.targets[target].split()[1], self._heard, self._device)

    def again(self, target: int, given: Given) -> AllToAllReplay:  # noqa: ARG002  as the protocol has it
        raise ReplayError("training has not communicated yet, and its groups are not known")


class _AllToAllListener:
    """The newest AllToAll of training among certain ranks."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.splits: Splits | None = None
        self.dtype: torch.dtype = torch.float32
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._handle: Handle | None = None

    def listen(self) -> None:
        if self._handle is None:
            self._handle = listen(self)

    def rest(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def group(self) -> dist.ProcessGroup:
        group = None if self._group is None else self._group()
        if group is None:
            raise ReplayError(f"no AllToAll among ranks {self.members} was seen since replay was attached")
        return group

    def before(self, call: Call) -> None:
        splits = call.splits
        if splits is not None and tuple(sorted(call.group.members or ())) == self.members:
            self.splits, self.dtype = splits, call.dtype or torch.float32
            self._group = weakref.ref(call.process_group)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """What is sent is known before."""


class AllToAllReplay:
    """One plan, carried out once for each observation."""

    def __init__(self, plan: str, heard: _AllToAllListener, device: torch.device) -> None:
        self._plan, self._heard, self._device = plan, heard, device
        self._sent: list[int] = []
        self._received: list[int] = []
        self._given = self._got = torch.empty(0, device="cpu")
        self._group: dist.ProcessGroup | None = None

    def describe(self) -> Any:
        self._heard.rest()
        self._group, splits = self._heard.group, self._heard.splits
        assert splits is not None, "known with the group"
        return {"sent": splits.sent, "received": splits.received, "dtype": str(self._heard.dtype)[6:]}

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:
        told = descriptions[source]
        place, members = dist.get_rank(self._group), len(self._heard.members)
        if self._plan == CAPTURED:
            self._sent, self._received = list(told["sent"]), list(told["received"])
        else:
            plan = PLANS[self._plan](members, ROWS * members)
            self._sent = [WIDTH * count for count in plan[place]]
            self._received = [WIDTH * row[place] for row in plan]
        dtype = getattr(torch, told["dtype"])
        self._given = _scratch(place, sum(self._sent), dtype, self._device)
        self._got = torch.zeros(sum(self._received), dtype=dtype, device=self._device)

    def align(self, broadcast: Broadcast) -> None:
        """Nothing travels: the data follow from the place."""

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return self._plan, (self._given.numel(), self._got.numel())

    def comparisons(self) -> list[Comparison]:
        sent, received = f"all_to_all/{self._plan}.sent", f"all_to_all/{self._plan}.received"
        return [
            Comparison(sent, Mode.INPUT),
            Comparison(received, Mode.FORWARD, (sent,), absent="it receives nothing by this plan"),
        ]

    def observe(self, variant: float, seen: Observation) -> None:  # noqa: ARG002  nothing is scaled
        sent, received = (each.surface for each in self.comparisons())
        seen.sign({sent: self._given})
        self._got.zero_()
        with timed(self._device, seen, work=None, communication="time/{}@"), announced():
            dist.all_to_all_single(self._got, self._given, self._received, self._sent, group=self._group)
        seen.sign({received: self._got})

    def invocation(self) -> None:
        """A plan is no call."""

    def release(self) -> None:
        self._heard.rest()
        self._given = self._got = torch.empty(0, device="cpu")
        self._group = None


def _scratch(place: int, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Bytes that tell places and offsets apart, the same in every replica."""
    size = elements * dtype.itemsize
    pattern = (torch.arange(size, dtype=torch.int64, device="cpu") * 197 + 89 * place + 1) & 0xFF
    return pattern.to(torch.uint8).view(dtype).to(device)
