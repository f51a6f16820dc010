"""Comparisons and conclusions as plain data and as JSON (paper, sections 5 and 9).

An ``EvidenceRecord`` is one comparison with its context, an ``Incident`` a conclusion with the records that
prove it, ``Resolved`` the end of an incident, and ``Agreements`` the number of comparisons without a finding.
``Started`` and ``Trust`` are the history of the job. The recorder adds the time.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from torchscout.decision.consensus import Status, Verdict
from torchscout.utils.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "SCHEMA",
    "Action",
    "Agreement",
    "Agreements",
    "Decision",
    "EvidenceRecord",
    "Failure",
    "Incident",
    "LeftOut",
    "Manifestation",
    "Recordable",
    "Resolved",
    "Scope",
    "Started",
    "Surface",
    "Trust",
    "from_json",
    "surfaces_in_words",
]

SCHEMA = 1
"""Version of the JSON form; readers reject other versions."""

Surface = str
"""The name of one compared thing: ``layer.3/output``, ``optimizer/param``, ``time/module``."""

NOT_CHECKED = "not_checked"

_Kind = TypeVar("_Kind")


class Manifestation(str, Enum):
    SDC = "sdc"
    """A rank computes or holds numbers that differ from those of its peers."""
    STRAGGLER = "straggler"
    """A rank, group or machine is persistently slower on equal work."""
    HANG = "hang"
    """The job has stopped making progress."""
    CRASH = "crash"
    """A trainer has ended before it had finished; others may have failed because of it."""
    NOT_CHECKED = "not_checked"
    """SCOUT itself has failed for good, so that wrong numbers and slow ranks are no longer found."""


class Scope(str, Enum):
    """How precisely a failure is located."""

    RANK = "rank"
    MACHINE = "machine"
    PEER_GROUP = "peer_group"
    PROCESS_GROUP = "process_group"
    JOB = "job"

    @property
    def is_named(self) -> bool:
        """Whether the ranks of an incident are accused; otherwise they are all who may be concerned."""
        return self in (Scope.RANK, Scope.MACHINE)


class Action(str, Enum):
    """What recovery should do first."""

    CONTINUE = "continue"
    RESTART = "restart_in_place"
    INSPECT = "inspect_hardware"
    PREFLIGHT = "preflight"
    """Restart, and check the machines of these ranks before they train: whichever fails is replaced."""
    REPLACE = "replace_machine"
    STOP = "stop"
    """A restart makes no sense: the program is at fault, or restarts have not helped."""


class Failure(str, Enum):
    """Why a job restarts, which determines the checkpoint that it loads."""

    SDC = "sdc"
    STRAGGLER = "straggler"
    HANG = "hang"
    MACHINES_GONE = "machines_gone"
    """A machine cannot be reached, so neither can the state in its memory."""
    OTHER = "other"
    """A crash, an exception, a preemption."""


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
    """The size of what was replayed, such as the shape of a layer's input."""
    progress: Mapping[str, Any] | None = None
    """The progress of one rank, for a hang."""
    fingerprints: tuple[str, ...] = ()
    """The last collectives of that rank, oldest first."""
    stall_seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.verdict is None) == (self.reason is None):
            raise ValueError(f"{self.surface}: a record needs either a verdict or a reason why it has none")
        if self.verdict is not None and len(self.verdict.evidence) != len(self.peers):
            raise ValueError(
                f"{self.surface}: {len(self.verdict.evidence)} pieces of evidence for {len(self.peers)} peers"
            )

    @property
    def status(self) -> str:
        return NOT_CHECKED if self.verdict is None else self.verdict.status.value

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that the verdict names."""
        outliers = () if self.verdict is None else self.verdict.outliers
        return tuple(self.peers[position] for position in outliers)

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


_CONTEXT = ("layer", "mode", "shape", "progress", "fingerprints", "stall_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A conclusion that a person or a recovery policy can act on."""

    manifestation: Manifestation
    scope: Scope
    step: int
    ranks: tuple[int, ...]
    """The ranks that are named; for the scope of a group, all its members."""
    hosts: tuple[str, ...]
    """The distinct machines of those ranks; empty if the mesh does not know them."""
    records: tuple[EvidenceRecord, ...]
    """The proof, the deciding record first."""
    action: Action
    sentence: str
    """The conclusion in full sentences."""
    slowdown: float | None = None
    """How many times as long a step takes because of a slow rank or machine; None if it is not known."""

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError(f"an incident needs the records that prove it: {self.sentence!r}")

    @property
    def reporter(self) -> int:
        """The rank that writes the incident: a peer that is not named, if there is one."""
        peers = self.records[0].peers
        return next((rank for rank in peers if rank not in self.ranks), peers[0])

    @property
    def logged_by(self) -> int:
        """The rank that logs the incident: rank 0, unless it is named itself and may not be able to run."""
        return self.reporter if 0 in self.ranks else 0

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
            "slowdown": self.slowdown,
            "records": [record.to_json() for record in self.records],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The named ranks of an incident move again, or the job went back to an earlier state."""

    step: int
    """The step of the incident."""
    ranks: tuple[int, ...]
    """The ranks that the incident named."""
    sentence: str
    """The sentence of the incident, which identifies it."""
    stalled_seconds: float
    """The longest silence among those ranks until they moved; 0 after corruption."""
    recovered: int | None = None
    """The step that the job went back to; None if the ranks just moved."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "resolved", **asdict(self), "ranks": list(self.ranks)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the recovery policy decided about one incident."""

    step: int
    """The step of the incident."""
    action: Action
    failure: Failure
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """The machines of those ranks; with ``REPLACE``, those that must not be used again, and with
    ``PREFLIGHT``, those to check."""
    sentence: str
    """The decision and its reason."""
    scope: Scope = Scope.JOB
    """The scope of the incident."""
    seconds: float = 0.0
    """For how long the job had run since its last start."""
    devices: tuple[str, ...] = ()
    """The devices of the named ranks, as far as they are known."""
    is_carried_out: bool = False
    """False in a dry run."""

    def to_json(self) -> dict[str, Any]:
        names = {each: getattr(self, each).value for each in ("action", "failure", "scope")}
        lists = {name: [*getattr(self, name)] for name in ("ranks", "hosts", "devices")}
        return {"kind": "decision", **asdict(self), **names, **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often one surface was compared without a finding."""

    surface: Surface
    manifestation: Manifestation
    layer: str | None
    mode: str | None
    count: int
    first: int
    """The step of the first comparison."""
    last: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "manifestation": self.manifestation.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreements:
    """The comparisons of some peers without a finding since the last such line, instead of their records."""

    peers: tuple[int, ...]
    surfaces: tuple[Agreement, ...]

    @property
    def step(self) -> int:
        """The step of the last comparison."""
        return max((each.last for each in self.surfaces), default=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "agreements",
            "step": self.step,
            "peers": list(self.peers),
            "surfaces": [each.to_json() for each in self.surfaces],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A session was attached, or has loaded a checkpoint."""

    step: int
    """The step that training continues from."""
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": "started", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The steps of the generations that the checkpoint gate has after a check; None where there is none."""

    step: int
    """The step of the check."""
    latest: int | None
    candidate: int | None
    verified: int | None
    poisoned: int | None
    """The step whose check found corruption, until the job has recovered."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "trust", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Older lines that were not kept."""

    count: int

    def to_json(self) -> dict[str, Any]:
        return {"kind": "left_out", **asdict(self)}


Recordable = EvidenceRecord | Incident | Resolved | Decision | Agreements | Started | Trust | LeftOut


def from_json(line: Mapping[str, Any]) -> Recordable:
    """Read what ``to_json`` returned; raises ``ValueError`` for anything else."""
    readers: dict[str, Callable[[Mapping[str, Any]], Recordable]] = {
        "evidence": _record_from_json,
        "incident": _incident_from_json,
        "resolved": lambda line: _from_fields(Resolved, line, recovered=line.get("recovered")),
        "decision": _decision_from_json,
        "agreements": _agreements_from_json,
        "started": lambda line: _from_fields(Started, line),
        "trust": lambda line: _from_fields(Trust, line),
        "left_out": lambda line: _from_fields(LeftOut, line),
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
    manifestation = Manifestation(line["manifestation"])
    return _from_fields(EvidenceRecord, line, verdict=verdict, manifestation=manifestation)


def _incident_from_json(line: Mapping[str, Any]) -> Incident:
    return _from_fields(
        Incident,
        line,
        manifestation=Manifestation(line["manifestation"]),
        scope=Scope(line["scope"]),
        records=tuple(_record_from_json(record) for record in line["records"]),
        action=Action(line["action"]),
    )


def _decision_from_json(line: Mapping[str, Any]) -> Decision:
    enums = {"action": Action(line["action"]), "failure": Failure(line["failure"])}
    return _from_fields(Decision, line, **enums, scope=Scope(line["scope"]))


def _agreements_from_json(line: Mapping[str, Any]) -> Agreements:
    surfaces = tuple(
        _from_fields(Agreement, each, manifestation=Manifestation(each["manifestation"]))
        for each in line["surfaces"]
    )
    return _from_fields(Agreements, line, surfaces=surfaces)


def _from_fields(kind: type[_Kind], line: Mapping[str, Any], **converted: Any) -> _Kind:
    """Build a dataclass from the JSON of its fields, except for those that the caller has converted."""
    names = [each.name for each in fields(kind) if each.name not in converted]  # type: ignore[arg-type]
    return kind(**{name: _frozen(line[name]) for name in names}, **converted)


def _encode(value: Any) -> float | str:
    """A time as a number, a signature as 16 hex digits, since JSON readers round integers beyond 2**53.

    JSON has no infinity either, so it is text.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return f"{value & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _decode(value: float | str) -> float | int:
    if not isinstance(value, str) or len(value) < 16:
        return float(value)
    if len(value) > 16:
        raise ValueError(f"not a time or a signature: {value!r:.80}")
    unsigned = int(value, 16)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
