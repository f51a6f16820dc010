"""What can be replayed, and what a replay returns (paper, section 6.1).

A recipe knows one kind of work and the targets that it rotates over. A replay is one execution of it at
the end of one training step. ``replayer`` makes the calls, in the order in which they are numbered.
``Peers`` and ``JobExchange`` are what a replay needs of the other ranks; ``communicators`` has
the process groups behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash

from torchscout.decision.channel import PeerChannel
from torchscout.decision.fold import signed
from torchscout.decision.record import EvidenceRecord, Surface
from torchscout.decision.sdc import INPUT, STATE
from torchscout.decision.signature import PendingSignatures, digest, read_signatures
from torchscout.decision.straggler.timings import Lap, Measured
from torchscout.mesh import LayerKind, PeerGroup
from torchscout.replay.capture.broadcast import Broadcast
from torchscout.replay.capture.invocation import Invocation

__all__ = [
    "ABSENT",
    "POISON",
    "UNREPEATABLE",
    "Comparison",
    "Given",
    "JobExchange",
    "Laps",
    "LearningReplay",
    "Mode",
    "Observation",
    "Peers",
    "Recipe",
    "Replay",
    "StandingRecipe",
    "finish_signatures",
    "measured",
]

ABSENT = signed(xxhash.xxh3_64_intdigest(b"torchscout: there is nothing to compare here"))
"""In place of a signature: this rank has no such tensor. Not checked if no peer has it, else a difference."""
POISON = signed(xxhash.xxh3_64_intdigest(b"torchscout: this rank failed in replay"))
"""In place of a signature: this rank could not compute it. Never evidence against anybody."""
UNREPEATABLE = signed(xxhash.xxh3_64_intdigest(b"torchscout: computed by an operator that does not repeat"))
"""In place of a signature: an operator without a deterministic version has computed it on this rank."""


class Mode:
    """What a comparison is about, as records spell it."""

    INPUT = INPUT
    """Whether peers started from the same values."""
    STATE = STATE
    """What a rank holds: weights, optimizer slots."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing the peers will compare; known before anything is computed, and the same on all of them."""

    surface: Surface
    mode: str
    premises: tuple[Surface, ...] = ()
    """Surfaces of the same replay that must agree first: a result says nothing if the inputs differed."""
    summary: Surface | None = None
    """Under this name agreeing comparisons are recorded as one: a census has thousands."""
    absent: str = "there was nothing to compare"
    """The reason to give where no peer had anything."""
    tie: str | None = None
    """The reason to give where there is no majority, if that is another comparison's to report."""
    right: int | None = None
    """What a rank must have, where that is known without a vote: each is its own witness then."""
    is_new: bool = False
    """Whether peers have never compared this state: they may hold different ones by design."""
    is_local: bool = False
    """Whether it is known that they do, should it still differ."""

    @property
    def is_held(self) -> bool:
        """Whether it is read and not computed in the replay, so that no kernel can make it differ."""
        return not self.premises or self.right is not None or self.mode in (Mode.STATE, Mode.INPUT)


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replay produces on this rank, filled in as it goes: what was seen before a failure counts."""

    signatures: dict[Surface, int] = field(default_factory=dict)
    """One for each comparison, ``ABSENT`` where there was no tensor."""
    times: dict[Surface, float] = field(default_factory=dict)
    """What this rank spent by itself, in milliseconds."""
    laps: dict[tuple[Surface, tuple[int, ...]], Laps] = field(default_factory=dict)
    """What it spent in collectives, by surface and members of the process group."""
    unrepeatable: dict[Surface, str] = field(default_factory=dict)
    """What an operator without a deterministic version has computed, with the reason."""
    refused: list[str] = field(default_factory=list)
    """Why strict deterministic algorithms have ended this replay: it can be made again without them."""
    unread: list[Callable[[], None]] = field(default_factory=list)
    """Clocks that have not been read: a device is not to be waited for in the middle of its work."""
    unsigned: list[tuple[PendingSignatures, Callable[[list[int]], None]]] = field(default_factory=list)
    """Signatures that a device may still compute, and what to do with them; see ``finish_signatures``."""

    def sign(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """Fill in the signature of each."""
        names = list(tensors)
        self.when_signed(
            PendingSignatures(tensors.values()),
            lambda found: self.signatures.update(zip(names, found, strict=True)),
        )

    def sign_as_one(self, surface: Surface, tensors: Iterable[torch.Tensor]) -> None:
        """Fill in one number for all of them; see ``digest``."""
        self.when_signed(
            PendingSignatures(tensors), lambda found: self.signatures.update({surface: digest(found)})
        )

    def when_signed(self, pending: PendingSignatures, then: Callable[[list[int]], None]) -> None:
        """Call ``then`` with the signatures: at once, or when a device has computed them."""
        if pending.folds:
            self.unsigned.append((pending, then))
        else:
            then(pending.read())

    def read(self) -> None:
        """Fill in the times, once the work is done."""
        while self.unread:
            self.unread.pop(0)()

    def lap(
        self, surface: Surface, members: tuple[int, ...] | None, elements: int, milliseconds: float
    ) -> None:
        """One more collective; one of a group that nobody knows is left out."""
        if members is not None:
            laps = self.laps.setdefault((surface, tuple(sorted(members))), Laps())
            laps.elements += elements
            laps.milliseconds.append(milliseconds)


def finish_signatures(every: Iterable[Observation]) -> None:
    """Wait for the devices once, and fill in what they have signed."""
    waiting = [each for seen in every for each in seen.unsigned]
    for seen in every:
        seen.unsigned.clear()
    for (_, then), found in zip(waiting, read_signatures([each for each, _ in waiting]), strict=True):
        then(found)


@dataclass(slots=True)
class Laps:
    """The collectives of one kind that one replay made on one process group, in order."""

    elements: int = 0
    """Of all of them together."""
    milliseconds: list[float] = field(default_factory=list)


def measured(target: str, shape: tuple[int, ...], seen: Sequence[Observation]) -> Measured:
    """What a replay took; of its variants and repetitions, which are equal work, the shortest time."""
    surfaces = dict.fromkeys(surface for each in seen for surface in each.times)
    times = {
        surface: min(each.times[surface] for each in seen if surface in each.times) for surface in surfaces
    }
    # Of one variant, the same on all ranks: the members of a group must tell of one and the same transfer.
    laps = [
        Lap(surface, members, each.elements, tuple(each.milliseconds))
        for (surface, members), each in seen[0].laps.items()
    ]
    return Measured(target, shape, times, laps)


@dataclass(frozen=True, slots=True)
class Given:
    """What a replay without a training step starts from."""

    is_source: bool
    call: Mapping[str, Any] | None = None
    """The source's, described; None if no peer has kept one."""
    tensors: Sequence[torch.Tensor] | None = None
    """Its values, on the source."""


class Recipe(Protocol):
    """One kind of work: the embedding, hidden layers, the output layer, the optimizer, all state."""

    @property
    def kind(self) -> str: ...

    @property
    def targets(self) -> Sequence[str]:
        """What the rotation goes through, by name; the same on every peer."""
        ...

    @property
    def varies(self) -> bool:
        """Whether scaled inputs make sense; otherwise it is observed once, as captured."""
        ...

    @property
    def role(self) -> LayerKind:
        """Whose replicas compare it: those of dense layers, or those of experts."""
        ...

    @property
    def is_gathered(self) -> bool:
        """Whether it computes on gathered parameters: then ranks with other shards do the same work too."""
        ...

    @property
    def is_dynamic(self) -> bool:
        """Whether sizes change from call to call: then another size does not run for the first time."""
        ...

    @property
    def is_swept(self) -> bool:
        """Whether it can be replayed without a training step; the same on every rank."""
        ...

    @property
    def is_required(self) -> bool:
        """Whether a check is incomplete without it: scratch data that were sent say nothing about state."""
        ...

    def begin(self, target: int, *, is_source: bool) -> Replay:
        """Called before the training step at whose end the target is due: start to capture.

        Only the source's values will be needed; the others may keep descriptions alone.
        """
        ...

    def kept_as(self, target: int) -> str:
        """The name under which the call of a target is kept for a sweep; targets may have one in common."""
        ...

    def again(self, target: int, given: Given) -> Replay:
        """Called between training steps, in a sweep. ``ReplayError`` says why it cannot be replayed."""
        ...


@runtime_checkable
class LearningReplay(Protocol):
    """A replay that takes something from what was found, for later checks."""

    def learn(self, records: Sequence[EvidenceRecord]) -> None:
        """Called with the records of the first comparison, the same on every peer, if no peer has failed."""
        ...


@runtime_checkable
class StandingRecipe(Protocol):
    """A recipe that follows training all the time, and not only in steps at whose end it is due."""

    def start(self) -> None:
        """Called once, before training."""
        ...

    def close(self) -> None:
        """Called when replay ends: nothing may stay on training's objects."""
        ...


class Replay(Protocol):
    """One execution. Every peer makes the same calls in this order; only 3 communicates."""

    def describe(self) -> Any:
        """1. After the update: what this rank has captured, as JSON. May raise ``ReplayError``."""
        ...

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:
        """2. With every peer's description, in peer order: make room for the source's values.

        Everything that may fail belongs here. May raise ``ReplayError``.
        """
        ...

    def align(self, broadcast: Broadcast) -> None:
        """3. Ask for the source's values, which are there when 5 is called; called on all peers or none."""
        ...

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        """What is run, and how large it is, once prepared. The first time, its times do not count."""
        ...

    def comparisons(self) -> Sequence[Comparison]:
        """4. What ``observe`` will find, in order; the same on every peer."""
        ...

    def observe(self, variant: float, seen: Observation) -> None:
        """5. Compute, with floating inputs scaled by ``variant``, and fill in what was seen. Called once for
        each variant, and again for each further replay: it must leave the aligned values as they are, and
        training untouched."""
        ...

    def invocation(self) -> Invocation | None:
        """6. The call that was replayed, on the source; None if a sweep needs none."""
        ...

    def release(self) -> None:
        """7. Let go of everything, whether or not any other call was made."""
        ...


class JobExchange(Protocol):
    """The whole job. Every rank of it makes the same calls in the same order."""

    size: int
    """How many ranks it has."""

    def highest(self, values: Sequence[int]) -> list[int]:
        """Each value's maximum over all ranks."""
        ...

    def first_problems(self, problems: Sequence[str | None]) -> list[str | None]:
        """For each piece of work what stands in its way on whichever rank, or None."""
        ...

    def exchange(self, document: Any) -> list[Any]:
        """Every rank's JSON document, by rank. For what is rare: it grows with the job."""
        ...


class Peers(JobExchange, Protocol):
    """One rank's connections."""

    group: PeerGroup
    position: int
    """Of this rank among its peers."""
    metadata: PeerChannel
    """Among peers, in host memory: descriptions."""
    evidence: PeerChannel
    """Among peers, over the accelerator's own network where there is one: signatures and times."""

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Fill the tensor with what the peer at position ``source`` holds in its own."""
        ...
