"""Replays the AllToAll among expert-parallel ranks on scratch data (paper, section 6.2).

A plan is a square matrix of row counts: how many rows each member of the group sends to each other member.
Corresponding groups of independent replicas execute the same plan, so uneven traffic alone makes no group
differ: they must receive the same bytes and take equally long. The transfer uses training's own process
group, which is taken from the calls that training makes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchscout.collectives.call import Call, Splits
from torchscout.errors import ReplayError
from torchscout.mesh import LayerKind
from torchscout.replay.guard import CallListener, announced
from torchscout.replay.recipe import Comparison, Mode, Observation, Recipe, Replay
from torchscout.replay.timing import timed

__all__ = ["CAPTURED", "PLANS", "AllToAllRecipe", "Plan"]

Plan = tuple[tuple[int, ...], ...]
"""Row ``i`` is what member ``i`` sends to each member."""

CAPTURED = "captured"
"""The plan of training's last AllToAll, on the source's replica."""


def _permuted(members: int, rows: int, receiver_of: Callable[[int], int]) -> Plan:
    """Each member sends all its rows to one other member."""
    return tuple(
        tuple(rows if receiver == receiver_of(sender) else 0 for receiver in range(members))
        for sender in range(members)
    )


def _balanced(members: int, rows: int) -> Plan:
    """Every member sends the same number of rows to every member."""
    return ((max(1, rows // members),) * members,) * members


def _shifted(members: int, rows: int) -> Plan:
    """Each member sends to the next one."""
    return _permuted(members, rows, lambda sender: (sender + 1) % members)


def _reversed(members: int, rows: int) -> Plan:
    """The first member sends to the last, and the last to the first."""
    return _permuted(members, rows, lambda sender: members - 1 - sender)


def _skewed(members: int, rows: int) -> Plan:
    """One expert is popular: each next member receives half as much, but at least one row."""
    shares = [1 << (members - 1 - min(place, 30)) if members <= 31 else 1 for place in range(members)]
    return (tuple(max(1, rows * share // sum(shares)) for share in shares),) * members


def _sparse(members: int, rows: int) -> Plan:
    """Every second member receives nothing."""
    used = (members + 1) // 2
    return (tuple(0 if receiver % 2 else max(1, rows // used) for receiver in range(members)),) * members


PLANS: dict[str, Callable[[int, int], Plan]] = {
    "balanced": _balanced,
    "shifted": _shifted,
    "reversed": _reversed,
    "skewed": _skewed,
    "sparse": _sparse,
}
"""Functions of the number of members and the rows that each of them sends, by name."""

ROWS = 64
"""In the plans above: rows that a member has for each other member."""
BYTES = {"cuda": 32 << 20}
FEW_BYTES = 1 << 20
"""What the busiest member of a plan sends or receives. A plan must show the bandwidth of links and not only
their latency, which is some tens of microseconds: 32 MiB take 0.7 ms over a link of 50 GB/s and 0.07 ms at
450 GB/s within a machine. On other devices, where Gloo moves 1 to 2 GB/s, 1 MiB takes as long. The busiest
member is the measure because one that is popular receives from all."""


class AllToAllRecipe(Recipe):
    """Training's own traffic, then the plans above."""

    kind = "all_to_all"
    targets = tuple(f"all_to_all {plan}" for plan in (CAPTURED, *PLANS))
    role = LayerKind.EXPERT
    is_dynamic = True
    is_required = False

    def __init__(self, members: tuple[int, ...], device: torch.device) -> None:
        """``members`` hold the experts of this rank's replica."""
        self._listener, self._device = _AllToAllListener(members), device

    def new_replay(self, target: int, *_: object) -> AllToAllReplay:
        self._listener.listen()
        return AllToAllReplay(self.targets[target].split()[1], self._listener, self._device)


class _AllToAllListener(CallListener):
    """Remembers training's last AllToAll among certain ranks."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.splits: Splits | None = None
        self.dtype: torch.dtype = torch.float32
        self._group: weakref.ref[dist.ProcessGroup] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        group = None if self._group is None else self._group()
        if group is None:
            raise ReplayError(f"no AllToAll among ranks {self.members} was seen since replay was attached")
        return group

    def before(self, call: Call) -> None:
        if call.splits is not None and tuple(sorted(call.group.members or ())) == self.members:
            self.splits, self.dtype = call.splits, call.dtype or torch.float32
            self._group = weakref.ref(call.process_group)


class AllToAllReplay(Replay):
    """One plan, executed once for each observation."""

    def __init__(self, plan: str, listener: _AllToAllListener, device: torch.device) -> None:
        self._plan, self._listener, self._device = plan, listener, device
        self._send_splits: list[int] = []
        self._receive_splits: list[int] = []
        self._sent = self._received = torch.empty(0, device="cpu")
        self._group: dist.ProcessGroup | None = None

    def describe(self) -> Any:
        self._listener.stop()
        self._group, splits = self._listener.group, self._listener.splits
        assert splits is not None, "known together with the group"
        return {"sent": splits.sent, "received": splits.received, "dtype": str(self._listener.dtype)[6:]}

    def prepare(self, descriptions: Sequence[Any], source: int, /) -> None:
        captured = descriptions[source]
        dtype = getattr(torch, captured["dtype"])
        place, members = dist.get_rank(self._group), len(self._listener.members)
        if self._plan == CAPTURED:
            self._send_splits, self._receive_splits = list(captured["sent"]), list(captured["received"])
        else:
            plan = PLANS[self._plan](members, ROWS * members)
            width = _width(plan, BYTES.get(self._device.type, FEW_BYTES) // dtype.itemsize)
            self._send_splits = [width * count for count in plan[place]]
            self._receive_splits = [width * row[place] for row in plan]
        self._sent = _scratch(place, sum(self._send_splits), dtype, self._device)
        self._received = torch.zeros(sum(self._receive_splits), dtype=dtype, device=self._device)

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        return self._plan, (self._sent.numel(), self._received.numel())

    def comparisons(self) -> list[Comparison]:
        sent, received = f"all_to_all/{self._plan}.sent", f"all_to_all/{self._plan}.received"
        return [
            Comparison(sent, Mode.INPUT),
            Comparison(received, Mode.FORWARD, (sent,), absent="this plan sends it nothing"),
        ]

    def observe(self, seen: Observation) -> None:
        sent, received = (each.surface for each in self.comparisons())
        seen.sign({sent: self._sent})
        self._received.zero_()
        splits = self._receive_splits, self._send_splits
        with timed(self._device, seen, work=None, communication="time/{}@"), announced():
            dist.all_to_all_single(self._received, self._sent, *splits, group=self._group)
        seen.sign({received: self._received})

    def release(self) -> None:
        self._listener.stop()
        self._sent = self._received = torch.empty(0, device="cpu")
        self._group = None


def _width(plan: Plan, elements: int) -> int:
    """Return the elements of a row with which the busiest member sends or receives about ``elements``."""
    busiest = max(map(sum, (*plan, *zip(*plan, strict=True))))
    return max(1, elements // busiest)


def _scratch(place: int, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return bytes that depend on the place and the offset only, the same in every replica."""
    size = elements * dtype.itemsize
    pattern = (torch.arange(256, dtype=torch.int64, device=device) * 197 + 89 * place + 1) & 0xFF
    return pattern.to(torch.uint8).repeat(-(-size // 256))[:size].view(dtype)
