"""What was compared and what was concluded, and how both look as JSON (paper, sections 5 and 9).

Plain data: an ``EvidenceRecord`` is one comparison with its context, an ``Incident`` a conclusion
together with the records that prove it, ``Resolved`` the news that a hang is over, ``Agreements`` how often
peers agreed. Time stamps belong to the recorder, not to the record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from torchscout.decision.consensus import Status, Verdict
from torchscout.utils.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "SCHEMA",
    "Action",
    "Agreement",
    "Agreements",
    "EvidenceRecord",
    "Incident",
    "Manifestation",
    "Resolved",
    "Scope",
    "Surface",
    "from_json",
    "surfaces_in_words",
]

SCHEMA = 1
"""Version of the JSON form; readers refuse what they do not know."""

Surface = str
"""The name of one compared thing: ``layer.3/output``, ``optimizer/param``, ``time/module``."""

NOT_CHECKED = "not_checked"


class Manifestation(str, Enum):
    SDC = "sdc"
    """A rank computes or holds other numbers than its peers."""
    STRAGGLER = "straggler"
    """A rank, group or machine is persistently slower on equal work."""
    HANG = "hang"
    """The job has stopped making progress."""


class Scope(str, Enum):
    """How precisely the evidence points."""

    RANK = "rank"
    MACHINE = "machine"
    PEER_GROUP = "peer_group"
    PROCESS_GROUP = "process_group"
    JOB = "job"


class Action(str, Enum):
    """What recovery should do first."""

    CONTINUE = "continue"
    RESTART = "restart_in_place"
    INSPECT = "inspect_hardware"
    REPLACE = "replace_machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRecord:
    """One comparison among peers, or the reason why there was none."""

    step: int
    surface: Surface
    manifestation: Manifestation
    """The failure this comparison can show."""
    peers: tuple[int, ...]
    """Global ranks in the order of the verdict's evidence."""
    verdict: Verdict | None = None
    """None when nothing was compared; ``reason`` then says why."""
    reason: str | None = None
    layer: str | None = None
    mode: str | None = None
    """What was replayed: ``forward``, ``backward``, ``optimizer``, or an input variant of them."""
    shape: tuple[int, ...] | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    """This rank's replay intervals in milliseconds."""
    progress: Mapping[str, Any] | None = None
    """Where this rank stood, for a hang."""
    fingerprints: tuple[str, ...] = ()
    """This rank's last collectives, oldest first."""
    stall_seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.verdict is None) == (self.reason is None):
            raise ValueError(
                f"{self.surface}: a record has either a verdict or a reason why it was not checked"
            )
        if self.verdict is not None and len(self.verdict.evidence) != len(self.peers):
            raise ValueError(
                f"{self.surface}: {len(self.verdict.evidence)} pieces of evidence for {len(self.peers)} peers"
            )

    @property
    def status(self) -> str:
        return NOT_CHECKED if self.verdict is None else self.verdict.status.value

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks the verdict names."""
        return (
            () if self.verdict is None else tuple(self.peers[position] for position in self.verdict.outliers)
        )

    @property
    def scope(self) -> Scope | None:
        """None unless peers disagreed."""
        if self.verdict is None or self.verdict.agrees:
            return None
        return Scope.RANK if self.verdict.status is Status.ATTRIBUTED else Scope.PEER_GROUP

    def to_json(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "kind": "evidence",
            "step": self.step,
            "manifestation": self.manifestation.value,
            "scope": self.scope and self.scope.value,
            "ranks": list(self.ranks),
            "hosts": [],
            "surface": self.surface,
            "status": self.status,
            "reason": self.reason,
            "peers": list(self.peers),
            "bitmap": list(verdict.bitmap) if verdict else [],
            "evidence": [_encode(value) for value in verdict.evidence] if verdict else [],
            "action": None,
            "sentence": None,
            **{name: _plain(getattr(self, name)) for name in _CONTEXT},
        }


def surfaces_in_words(records: Iterable[EvidenceRecord]) -> str:
    """List the surfaces of some records, with the layers that the names of surfaces do not contain."""
    surfaces, layers = dict[str, None](), dict[str, None]()
    for each in records:
        surfaces[each.surface] = None
        if each.layer is not None and not each.surface.startswith((f"{each.layer}/", f"{each.layer}.")):
            layers[each.layer] = None
    return f"{listed(surfaces)} (of {listed(layers)})" if layers else listed(surfaces)


_CONTEXT = ("layer", "mode", "shape", "timings", "progress", "fingerprints", "stall_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A conclusion a person or a recovery policy can act on."""

    manifestation: Manifestation
    scope: Scope
    step: int
    ranks: tuple[int, ...]
    """Who is named; for a group scope, all its members."""
    hosts: tuple[str, ...]
    """The machines of those ranks, each once; empty where the mesh does not know them."""
    records: tuple[EvidenceRecord, ...]
    """The proof, the deciding record first."""
    action: Action
    sentence: str
    """The conclusion in words."""

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError(f"an incident needs the records that prove it: {self.sentence!r}")

    @property
    def reporter(self) -> int:
        """The one rank that should write this down: a peer that is not itself suspect, if there is one."""
        peers = self.records[0].peers
        return next((rank for rank in peers if rank not in self.ranks), peers[0])

    def to_json(self) -> dict[str, Any]:
        deciding = self.records[0].to_json()
        return {
            "kind": "incident",
            "step": self.step,
            "manifestation": self.manifestation.value,
            "scope": self.scope.value,
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            **{name: deciding[name] for name in ("surface", "status", "peers", "bitmap")},
            "action": self.action.value,
            "sentence": self.sentence,
            "records": [record.to_json() for record in self.records],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The ranks that an incident named move again, or the job went back to a state from before it."""

    step: int
    """Of the incident."""
    ranks: tuple[int, ...]
    """Who was named."""
    sentence: str
    """The incident's own, by which it is known."""
    stalled_seconds: float
    """The longest silence among those ranks, up to when they moved; 0 after corruption."""
    recovered: int | None = None
    """The step that the job went back to; None where the ranks just moved."""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "resolved",
            "step": self.step,
            "ranks": list(self.ranks),
            "sentence": self.sentence,
            "stalled_seconds": self.stalled_seconds,
            "recovered": self.recovered,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often one surface was compared without a finding."""

    surface: Surface
    manifestation: Manifestation
    layer: str | None
    mode: str | None
    count: int
    """Comparisons."""
    first: int
    """The step of the first of them."""
    last: int

    def to_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _AGREEMENT}
        return {**named, "manifestation": self.manifestation.value}


_AGREEMENT = ("surface", "manifestation", "layer", "mode", "count", "first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreements:
    """What the same peers compared without a finding since the last such line; replaces one record each."""

    peers: tuple[int, ...]
    surfaces: tuple[Agreement, ...]

    @property
    def step(self) -> int:
        """The last at which any of it was compared."""
        return max((each.last for each in self.surfaces), default=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "agreements",
            "step": self.step,
            "peers": list(self.peers),
            "surfaces": [each.to_json() for each in self.surfaces],
        }


def from_json(line: Mapping[str, Any]) -> EvidenceRecord | Incident | Resolved | Agreements:
    """Read back what ``to_json`` wrote; a ``ValueError`` says what is foreign about the line."""
    readers: dict[str, Callable[[Mapping[str, Any]], EvidenceRecord | Incident | Resolved | Agreements]] = {
        "evidence": _record_from_json,
        "incident": _incident_from_json,
        "resolved": _resolved_from_json,
        "agreements": _agreements_from_json,
    }
    kind = str(line.get("kind"))
    if kind not in readers:
        raise ValueError(f"unknown kind {kind!r}")
    try:
        return readers[kind](line)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a whole {kind} line: {error!r}") from error


def _record_from_json(line: Mapping[str, Any]) -> EvidenceRecord:
    verdict = None
    if line["status"] != NOT_CHECKED:
        outliers = tuple(position for position, bit in enumerate(line["bitmap"]) if bit)
        verdict = Verdict(
            Status(line["status"]), outliers, tuple(_decode(value) for value in line["evidence"])
        )
    return EvidenceRecord(
        step=line["step"],
        surface=line["surface"],
        manifestation=Manifestation(line["manifestation"]),
        peers=tuple(line["peers"]),
        verdict=verdict,
        reason=line["reason"],
        **{name: _frozen(line[name]) for name in _CONTEXT},
    )


def _incident_from_json(line: Mapping[str, Any]) -> Incident:
    return Incident(
        manifestation=Manifestation(line["manifestation"]),
        scope=Scope(line["scope"]),
        step=line["step"],
        ranks=tuple(line["ranks"]),
        hosts=tuple(line["hosts"]),
        records=tuple(_record_from_json(record) for record in line["records"]),
        action=Action(line["action"]),
        sentence=line["sentence"],
    )


def _resolved_from_json(line: Mapping[str, Any]) -> Resolved:
    return Resolved(
        step=line["step"],
        ranks=tuple(line["ranks"]),
        sentence=line["sentence"],
        stalled_seconds=line["stalled_seconds"],
        recovered=line.get("recovered"),
    )


def _agreements_from_json(line: Mapping[str, Any]) -> Agreements:
    return Agreements(
        peers=tuple(line["peers"]), surfaces=tuple(_agreement_from_json(each) for each in line["surfaces"])
    )


def _agreement_from_json(line: Mapping[str, Any]) -> Agreement:
    named = {name: line[name] for name in _AGREEMENT}
    return Agreement(**{**named, "manifestation": Manifestation(named["manifestation"])})


def _encode(value: Any) -> float | str:
    """A time as a number, a signature as 16 hex digits.

    JSON readers round integers beyond 2**53 and JSON has no word for infinity.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return f"{value & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _decode(value: float | str) -> float | int:
    if not isinstance(value, str):
        return float(value)
    if len(value) < 16:
        return float(value)
    unsigned = int(value, 16)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
