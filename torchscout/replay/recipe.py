"""Base classes of what can be replayed, and what a replay returns (paper, section 6.1).

A ``Recipe`` covers one kind of work and rotates over its targets. A ``Replay`` is one execution of it at the
end of one training step; ``replayer`` calls its methods in the order in which they are numbered. ``Peers``
and ``JobExchange`` define how a replay reaches the other ranks; ``communicators`` implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash

from torchscout.c3.channel import PeerChannel
from torchscout.c3.fold import signed
from torchscout.c3.signature import PendingSignatures, digest, read_signatures
from torchscout.decision.sdc import INPUT, STATE
from torchscout.decision.types import EvidenceRecord, Surface
from torchscout.mesh import LayerKind, PeerGroup
from torchscout.replay.capture.broadcast import Broadcast
from torchscout.replay.capture.invocation import Invocation
from torchscout.replay.schedule import InTurn, Order

__all__ = [
    "ABSENT",
    "POISON",
    "SWEPT_TOGETHER",
    "UNREPEATABLE",
    "Comparison",
    "JobExchange",
    "Lap",
    "Measured",
    "Mode",
    "Observation",
    "Peers",
    "Recipe",
    "Replay",
    "SavedInput",
    "finish_signatures",
    "measured",
]

ABSENT = signed(xxhash.xxh3_64_intdigest(b"torchscout: there is nothing to compare here"))
"""In place of a signature: this rank has no such tensor. Not checked if no peer has it, else a difference."""
POISON = signed(xxhash.xxh3_64_intdigest(b"torchscout: this rank failed in replay"))
"""In place of a signature: this rank could not compute it. Never evidence against a rank."""
UNREPEATABLE = signed(xxhash.xxh3_64_intdigest(b"torchscout: computed by an operator that does not repeat"))
"""In place of a signature: this rank computed it with an operator that has no deterministic version."""

SWEPT_TOGETHER = 1 << 26
"""Bytes that the targets of one round of a sweep may need together; larger ones are replayed one by one."""


class Mode:
    """What a comparison is about, as written in records."""

    INPUT = INPUT
    """Whether peers started from the same values."""
    STATE = STATE
    """Stored state: weights, optimizer slots."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One surface that peers compare. Known before anything is computed, and identical on all peers."""

    surface: Surface
    mode: str
    premises: tuple[Surface, ...] = ()
    """Surfaces of the same replay that must agree first: a result says nothing if its inputs differed."""
    summary: Surface | None = None
    """Agreeing comparisons with the same summary are recorded as one under this name."""
    absent: str = "there was nothing to compare"
    """Reason to record if no peer has a value."""
    tie: str | None = None
    """Reason to record if there is no majority, where another comparison reports that case."""
    expected: int | None = None
    """The only correct value, if it is known without a vote. Each rank then proves its own fault."""
    is_new: bool = False
    """Whether peers have never compared this state: it may differ by design."""
    is_local: bool = False
    """Whether a difference in this state is known to be by design."""

    @property
    def is_stored(self) -> bool:
        """Whether the value is read, not computed in the replay, so that no kernel can make it differ."""
        return not self.premises or self.expected is not None or self.mode in (Mode.STATE, Mode.INPUT)


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replay produces on this rank. Filled in step by step: results before a failure count."""

    variant: float = 1.0
    """The factor by which floating-point inputs are scaled."""
    signatures: dict[Surface, int] = field(default_factory=dict)
    """One for each comparison, ``ABSENT`` where there was no tensor."""
    times: dict[Surface, float] = field(default_factory=dict)
    """Milliseconds that this rank spent by itself."""
    laps: dict[tuple[Surface, tuple[int, ...]], list[tuple[int, float]]] = field(default_factory=dict)
    """Elements and milliseconds of each collective, by surface and members of the process group."""
    unrepeatable: dict[Surface, str] = field(default_factory=dict)
    """Surfaces computed by an operator without a deterministic version, with the reason."""
    refused: list[str] = field(default_factory=list)
    """Why strict deterministic algorithms ended this replay; it can be repeated without them."""
    unread: list[Callable[[], None]] = field(default_factory=list)
    """Clocks that have not been read, because reading one synchronizes with the device."""
    unsigned: list[tuple[PendingSignatures, Callable[[list[int]], None]]] = field(default_factory=list)
    """Signatures that a device may still be computing, with their callbacks; see ``finish_signatures``."""

    def sign(self, tensors: Mapping[Surface, torch.Tensor]) -> None:
        """Record the signature of each tensor."""
        names = list(tensors)
        self.when_signed(
            PendingSignatures(tensors.values()),
            lambda found: self.signatures.update(zip(names, found, strict=True)),
        )

    def sign_as_one(self, surface: Surface, tensors: Sequence[torch.Tensor] | PendingSignatures) -> None:
        """Record one ``digest`` for all tensors, or ``ABSENT`` if there are none."""
        if not tensors:
            self.signatures[surface] = ABSENT
            return
        pending = tensors if isinstance(tensors, PendingSignatures) else PendingSignatures(tensors)
        self.when_signed(pending, lambda found: self.signatures.update({surface: digest(found)}))

    def when_signed(self, pending: PendingSignatures, then: Callable[[list[int]], None]) -> None:
        """Call ``then`` with the signatures: immediately, or once a device has computed them."""
        if pending.folds:
            self.unsigned.append((pending, then))
        else:
            then(pending.read())

    def read(self) -> None:
        """Read the clocks, once the work is done."""
        while self.unread:
            self.unread.pop(0)()

    def lap(
        self, surface: Surface, members: tuple[int, ...] | None, elements: int, milliseconds: float
    ) -> None:
        """Add one collective; ignored if the members of its group are not known."""
        if members is not None:
            key = (surface, tuple(sorted(members)))
            self.laps.setdefault(key, []).append((elements, milliseconds))


def finish_signatures(observations: Iterable[Observation]) -> None:
    """Wait for the devices once, and record the signatures that they have computed."""
    waiting = [each for seen in observations for each in seen.unsigned]
    for seen in observations:
        seen.unsigned.clear()
    for (_, then), found in zip(waiting, read_signatures([each for each, _ in waiting]), strict=True):
        then(found)


@dataclass(frozen=True, slots=True)
class Lap:
    """The collectives of one kind that one replay made on one process group."""

    surface: Surface
    """Ends in ``@`` for the collectives of a module, whose surfaces get the axis of the group."""
    members: tuple[int, ...]
    elements: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one replay on this rank."""

    layer: str
    shape: tuple[int, ...]
    """The size of the work."""
    times: Mapping[Surface, float]
    laps: Sequence[Lap]


def measured(target: str, shape: tuple[int, ...], seen: Sequence[Observation]) -> Measured:
    """Return the times of a replay: the shortest over its variants and repetitions, which are equal work."""
    surfaces = dict.fromkeys(surface for each in seen for surface in each.times)
    times = {
        surface: min(each.times[surface] for each in seen if surface in each.times) for surface in surfaces
    }
    # From one variant, the same on all ranks: the members of a group must report the same transfer.
    laps = [
        Lap(surface, members, sum(elements for elements, _ in each), tuple(ms for _, ms in each))
        for (surface, members), each in seen[0].laps.items()
    ]
    return Measured(target, shape, times, laps)


@dataclass(frozen=True, slots=True)
class SavedInput:
    """What a replay without a training step starts from."""

    is_source: bool
    call: Mapping[str, Any] | None = None
    """Description of the source's call; None if no peer has saved one."""
    tensors: Sequence[torch.Tensor] | None = None
    """The values of that call; only on the source."""


class Recipe:
    """Base class: one kind of work, such as hidden layers, the optimizer, or all state."""

    kind: str
    targets: Sequence[str] = ("",)
    """What the rotation goes through, by name; identical on every peer."""
    role: LayerKind = LayerKind.DENSE
    """Whose replicas compare it: those of dense layers or those of experts."""
    varies: bool = False
    """Whether it is also replayed on scaled inputs."""
    is_gathered: bool = False
    """Whether it computes on gathered parameters: ranks with other shards then do the same work."""
    is_dynamic: bool = False
    """Whether sizes change from call to call: a new size is then not treated as a first, cold run."""
    is_swept: bool = False
    """Whether it can be replayed without a training step; identical on every rank."""
    is_required: bool = True
    """Whether a check without it is incomplete. Transfers of scratch data prove nothing about state."""

    def start(self) -> None:
        """Attach to training's objects. Called once, before training."""

    def close(self) -> None:
        """Detach from training's objects. Called once, when replay ends."""

    def begin(self, target: int, *, is_source: bool) -> Replay:
        """Start to capture the training step at whose end this target is due.

        Only the source's values are needed; other ranks may keep descriptions only.
        """
        return self.new_replay(target, is_source, None)

    def replay_saved(self, target: int, saved: SavedInput) -> Replay:
        """Replay in a sweep, between training steps, if ``is_swept``. May raise ``ReplayError``."""
        return self.new_replay(target, saved.is_source, saved)

    def new_replay(self, target: int, is_source: bool, saved: SavedInput | None, /) -> Replay:
        """Create the replay that ``begin`` or, with ``saved``, ``replay_saved`` returns."""
        raise NotImplementedError

    @property
    def order(self) -> Order:
        """The order in which checks go through the targets."""
        return InTurn(len(self.targets))

    def swept(self) -> Sequence[int]:
        """Return the targets that a sweep replays."""
        return range(len(self.targets))

    def swept_bytes(self, target: int) -> int:  # noqa: ARG002  for subclasses
        """Return about how much memory a sweep of the target needs besides its saved call."""
        return SWEPT_TOGETHER

    def saved_name(self, target: int) -> str:
        """Return the name under which the call of a target is saved; several targets may share one."""
        return self.targets[target]


class Replay:
    """Base class: one execution. All peers make the same calls in this order; only ``align`` and
    ``agree`` communicate."""

    def describe(self) -> Any:
        """1. After the update: return what this rank has captured, as JSON. May raise ``ReplayError``."""

    def prepare(self, descriptions: Sequence[Any], source: int, /) -> None:
        """2. With the descriptions of all peers, in peer order: allocate memory for the source's values.

        Everything that can fail belongs here or in ``describe``. May raise ``ReplayError``.
        """

    def align(self, broadcast: Broadcast, /) -> None:
        """3. Request the source's values, which arrive before 6. Called on all peers or none."""

    @property
    def has_news(self) -> bool:
        """Whether this rank has something to exchange with the whole job in ``agree``."""
        return False

    def agree(self, has_news: bool, /) -> None:
        """4. Exchange it. ``has_news`` if any rank has; called on all ranks of the job or none."""

    @property
    def work(self) -> tuple[str, tuple[int, ...]]:
        """Name and size of the work, once prepared. The first run of each is not timed."""
        return "", ()

    def comparisons(self) -> Sequence[Comparison]:
        """5. Return what ``observe`` will fill in, in order; identical on every peer."""
        raise NotImplementedError

    def observe(self, seen: Observation) -> None:
        """6. Compute, with floating-point inputs scaled by ``seen.variant``, and fill in ``seen``.

        Called for each variant and for each repetition: must change neither the aligned values nor training.
        """
        raise NotImplementedError

    def learn(self, records: Sequence[EvidenceRecord]) -> None:
        """7. Remember results for later checks. Called with the same records on all peers, if none failed."""

    def invocation(self) -> Invocation | None:
        """8. Return the replayed call on the source, or None if a sweep needs none."""

    def settle(self) -> None:
        """9. Forget what was examined. Not called if the check failed: a later one must examine it again."""

    def release(self) -> None:
        """10. Release everything, whether or not any other method was called."""


class JobExchange(Protocol):
    """Exchanges among all ranks of the job. Every rank makes the same calls in the same order."""

    size: int
    """Number of ranks."""

    def highest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over all ranks."""
        ...

    def first_problems(self, problems: Sequence[str | None]) -> list[str | None]:
        """Return, for each piece of work, a problem that some rank has with it, or None."""
        ...

    def exchange(self, document: Any) -> list[Any]:
        """Return every rank's JSON document, by rank. For rare use: the cost grows with the job."""
        ...


class Peers(JobExchange, Protocol):
    """One rank's connections to its peers."""

    group: PeerGroup
    position: int
    """Of this rank among its peers."""
    metadata: PeerChannel
    """Among peers, in host memory: descriptions."""
    evidence: PeerChannel
    """Among peers, over the accelerator's network if there is one: signatures and times."""

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite the tensor with that of the peer at position ``source``."""
        ...
