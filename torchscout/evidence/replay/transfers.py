"""Sends scratch data over every process group that training uses (paper, sections 5.4 and 6.1.2).

A layer is replayed with the communication inside of it. What is outside has no layer to be replayed with:
gradients that replicas add up, what a stage of a pipeline passes to the next, the shards of an optimizer.
Here every group that training was heard to use carries as much as every other, so that those which correspond
can be compared; and what must arrive is known. Nothing of training's is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from torchscout.decision.fold import signed
from torchscout.decision.signature import PendingSignatures
from torchscout.errors import ReplayError
from torchscout.evidence.replay.alignment import Broadcast
from torchscout.evidence.replay.guard import announced
from torchscout.evidence.replay.heard import Heard, Link, agreed
from torchscout.evidence.replay.parcels import Room
from torchscout.evidence.replay.peers import Everybody
from torchscout.evidence.replay.recipe import ABSENT, Comparison, Given, Mode, Observation
from torchscout.evidence.replay.stopwatch import lapped
from torchscout.mesh import LayerKind

__all__ = ["TransferRecipe"]

RECEIVED = "transfers/received"
_AS_SENT = signed(xxhash.xxh3_64_intdigest(b"torchscout: what was sent has arrived"))
"""In place of a signature: everything arrived as it should."""


class TransferRecipe:
    """All links that training was heard on in the step at whose end it is due."""

    kind = "transfers"
    targets = ("transfers",)
    role = LayerKind.DENSE
    varies = False
    is_gathered = False
    is_dynamic = False
    is_swept = False
    vouches = False

    def __init__(self, everybody: Everybody, device: torch.device) -> None:
        self._device, self._heard, self._agreement = device, Heard(device), _Agreement(everybody)

    def kept_as(self, target: int) -> str:
        return self.targets[target]

    def begin(self, target: int, *, is_source: bool) -> _Transfers:  # noqa: ARG002  all send alike
        self._heard.listen()
        return _Transfers(self._heard, self._agreement, self._device)

    def again(self, target: int, given: Given) -> _Transfers:  # noqa: ARG002  as the protocol has it
        raise ReplayError("training has not communicated yet, and its groups are not known")


class _Agreement:
    """On links that all their members have heard: a rank that waits on one alone would wait for ever."""

    def __init__(self, everybody: Everybody) -> None:
        self._everybody = everybody
        self._own: list[Link] | None = None
        self._agreed: list[Link] = []
        self.is_silent = True
        """Whether nobody in the job was heard at all."""

    def on(self, links: Sequence[Link]) -> list[Link]:
        """Asked by every rank of the job; all tell each other only where something has changed."""
        own = sorted(links)
        if any(self._everybody.highest([own != self._own])):
            told = self._everybody.exchange([link.told() for link in own])
            self._own, self._agreed, self.is_silent = own, agreed(own, told), not any(told)
        return self._agreed


class _Transfers:
    """One on each link."""

    def __init__(self, heard: Heard, agreement: _Agreement, device: torch.device) -> None:
        self._heard, self._agreement, self._device = heard, agreement, device
        self._groups: dict[Link, dist.ProcessGroup] = {}
        self._links: list[Link] = []
        self._room: Room | None = None

    def describe(self) -> None:
        self._heard.rest()
        self._groups = self._heard.links()

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:  # noqa: ARG002  nothing is told
        self._room = Room(self._device)

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
            surface = f"time/{TransferRecipe.kind}_{link.operation}@"
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
