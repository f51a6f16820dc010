"""Comparisons and conclusions as plain data and as JSON (paper, sections 5 and 9).

A ``Verdict`` is what peers conclude from one comparison, an ``EvidenceRecord`` adds its context, and an
``Incident`` is a conclusion with the records that prove it. What writes them to files adds the time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torchscout.utils.text import listed

__all__ = [
    "NOT_CHECKED",
    "SCHEMA",
    "Action",
    "Agreement",
    "Agreements",
    "Decision",
    "EvidenceRecord",
    "Failure",
    "Incident",
    "Manifestation",
    "Recordable",
    "Resolved",
    "Scope",
    "Started",
    "Status",
    "Surface",
    "Trust",
    "Verdict",
    "from_json",
    "headline",
    "parsed",
    "surfaces_in_words",
]

SCHEMA = 1
"""Version of the JSON form; readers reject other versions."""
Surface = str
"""The name of one compared thing: ``layer.3/output``, ``optimizer/param``, ``time/module``."""
NOT_CHECKED = "not_checked"
"""The status of a record without a verdict."""


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

    @property
    def in_words(self) -> str:
        words = {"sdc": "wrong numbers", "straggler": "slow", "not_checked": "not checked"}
        return words.get(self.value, self.value)

    @property
    def stops_job(self) -> bool:
        """Whether the job makes no progress from then on: ranks wait for others, or have ended."""
        return self in (Manifestation.HANG, Manifestation.CRASH)


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


class Status(str, Enum):
    AGREE = "agree"
    """The evidence satisfies the rule."""
    ATTRIBUTED = "attributed"
    """The rule names one or more outliers."""
    INCONCLUSIVE = "inconclusive"
    """Peers disagree, and no majority decides which are right."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion of the peers: R = (s, B, E) in the paper."""

    status: Status
    outliers: tuple[int, ...]
    """Positions in the peer group, ascending; empty unless attributed."""
    evidence: Sequence[Hashable]
    """What each peer reported, in peer order."""

    @property
    def bitmap(self) -> tuple[int, ...]:
        """One bit per peer, 1 for an outlier."""
        marked = set(self.outliers)
        return tuple(int(position in marked) for position in range(len(self.evidence)))

    @property
    def agrees(self) -> bool:
        return self.status is Status.AGREE


class Recordable:
    """What a line of a file may be: a data class of its ``kind``."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **_fields_of(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRecord(Recordable):
    """One comparison among peers, or the reason why there was none."""

    kind: ClassVar[str] = "evidence"
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
    """The progress of one rank, for a hang or a crash."""
    fingerprints: tuple[str, ...] = ()
    """The last collectives of that rank, oldest first."""
    stall_seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.verdict is None) == (self.reason is None):
            raise ValueError(f"{self.surface}: a record needs either a verdict or a reason why it has none")
        if self.verdict is not None and (count := len(self.verdict.evidence)) != len(self.peers):
            raise ValueError(f"{self.surface}: {count} pieces of evidence for {len(self.peers)} peers")

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
        """The verdict is in three keys. The last three are an incident's: all lines have the same."""
        verdict = self.verdict
        return {
            "kind": self.kind,
            **_fields_of(self, leaving_out="verdict"),
            "scope": _plain(self.scope),
            "ranks": [*self.ranks],
            "status": self.status,
            "bitmap": [] if verdict is None else [*verdict.bitmap],
            "evidence": [] if verdict is None else [*map(_encode, verdict.evidence)],
            "hosts": [],
            "action": None,
            "sentence": None,
        }


def surfaces_in_words(records: Iterable[EvidenceRecord]) -> str:
    """List the surfaces of some records, with the layers that the names of surfaces do not contain."""
    surfaces, layers = dict[str, None](), dict[str, None]()
    for each in records:
        surfaces[each.surface] = None
        if each.layer is not None and not each.surface.startswith((f"{each.layer}/", f"{each.layer}.")):
            layers[each.layer] = None
    return f"{listed(surfaces)} (of {listed(layers)})" if layers else listed(surfaces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Recordable):
    """A conclusion that a person or a recovery policy can act on."""

    kind: ClassVar[str] = "incident"
    step: int
    manifestation: Manifestation
    scope: Scope
    ranks: tuple[int, ...]
    """The ranks that are named; for the scope of a group, all its members."""
    hosts: tuple[str, ...]
    """The distinct machines of those ranks; empty if the mesh does not know them."""
    action: Action
    sentence: str
    """The conclusion in full sentences."""
    records: tuple[EvidenceRecord, ...]
    """The proof, the deciding record first."""
    slowdown: float | None = None
    """How many times as long a step takes because of a slow rank or machine; None if it is not known."""
    launcher: str = ""
    """What the launcher calls this job, such as ``Slurm job 4711``; empty if it is not known."""
    occurrence: str = ""
    """Distinguishes incidents that say the same: what ``run.folder.Identity.stamped`` adds."""

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError(f"an incident needs the records that prove it: {self.sentence!r}")

    @property
    def id(self) -> str:
        """Identifies the incident in every file and message about it."""
        parts = (
            self.occurrence,
            self.step,
            self.manifestation.value,
            self.scope.value,
            self.ranks,
            self.sentence,
        )
        return hashlib.blake2s(repr(parts).encode(), digest_size=6).hexdigest()

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
        found = Recordable.to_json(self)
        deciding = found["records"][0]
        return {
            **found,
            "id": self.id,
            **{name: deciding[name] for name in ("surface", "status", "peers", "bitmap")},
        }


def headline(incident: Incident) -> str:
    """Return one line that says what has happened, for logs and messages."""
    sentence = " ".join(incident.sentence.split())
    return f"incident ({incident.manifestation.value}) at step {incident.step}: {sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Recordable):
    """The named ranks of an incident move again, or the job went back to an earlier state."""

    kind: ClassVar[str] = "resolved"
    incident: str
    """Its ``id``."""
    step: int
    """The step of the incident."""
    ranks: tuple[int, ...]
    """The ranks that the incident named."""
    sentence: str
    """The sentence of the incident."""
    stalled_seconds: float
    """The longest silence among those ranks until they moved; 0 after corruption."""
    recovered: int | None = None
    """The step that the job went back to; None if the ranks just moved."""
    hosts: tuple[str, ...] = ()
    manifestation: Manifestation | None = None
    scope: Scope | None = None
    """Those of the incident, as far as who records its end knows them."""

    @property
    def state(self) -> str:
        """What has become of the incident."""
        return "resolved" if self.recovered is None else "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Recordable):
    """What the recovery policy decided about one incident."""

    kind: ClassVar[str] = "decision"
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
    incident: str = ""
    """The ``id`` of the incident; empty if there was none."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreements(Recordable):
    """The comparisons of some peers without a finding since the last such line, instead of their records."""

    kind: ClassVar[str] = "agreements"
    peers: tuple[int, ...]
    surfaces: tuple[Agreement, ...]

    def to_json(self) -> dict[str, Any]:
        step = max((each.last for each in self.surfaces), default=0)
        return {**Recordable.to_json(self), "step": step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Recordable):
    """A session was attached, or has loaded a checkpoint."""

    kind: ClassVar[str] = "started"
    step: int
    """The step that training continues from."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust(Recordable):
    """The steps of the generations that the checkpoint gate has after a check; None where there is none."""

    kind: ClassVar[str] = "trust"
    step: int
    """The step of the check."""
    latest: int | None
    candidate: int | None
    verified: int | None
    poisoned: int | None
    """The step whose check found corruption, until the job has recovered."""
    is_kept: bool = True
    """Whether SCOUT keeps checkpoints; if not, ``verified`` is the newest certified step."""


_KINDS = {
    each.kind: each for each in (EvidenceRecord, Incident, Resolved, Decision, Agreements, Started, Trust)
}


def _fields_of(item: Any, leaving_out: str = "") -> dict[str, Any]:
    names = (each.name for each in fields(item) if each.name != leaving_out)
    return {name: _plain(getattr(item, name)) for name in names}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (int, float, str):  # most values are, in a large job
        return value
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Recordable):
        return value.to_json()
    return _fields_of(value) if is_dataclass(value) else value


def from_json(line: Mapping[str, Any]) -> Recordable:
    """Read what ``to_json`` returned. Fields that are not known are ignored. Raises ``ValueError`` for
    anything else."""
    kind = str(line.get("kind"))
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r:.40}")
    found: Recordable = parsed(_KINDS[kind], line)
    return found


def parsed(kind: type, document: Any) -> Any:
    """Read a data class from JSON. Fields that are not known are ignored, and a field that has a default may
    be missing. Raises ``ValueError`` for anything else."""
    try:
        return _reader(kind)(document)
    except (ArithmeticError, LookupError, TypeError) as error:
        raise ValueError(f"not a whole {kind.__name__}: {error!r:.200}") from error


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what reads JSON as a value of this type, or raises ``ValueError``."""
    arguments = get_args(kind)
    if type(None) in arguments:
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    if get_origin(kind) is tuple:
        read = _reader(arguments[0])
        return lambda values: tuple(map(read, _checked(list, values)))
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        return partial(_object, kind, {each: _reader(types[each.name]) for each in fields(kind)})
    if get_origin(kind) is Literal:
        return partial(_one_of, arguments)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    return partial(_checked, dict if get_origin(kind) is Mapping else kind)


def _object(kind: type, readers: Mapping[Field[Any], Callable[[Any], Any]], line: Any) -> Any:
    line = _checked(dict, line)
    needed = [each for each in readers if each.name in line or each.default is MISSING]
    found = {each.name: _named(each.name, readers[each], line[each.name]) for each in needed}
    if kind is EvidenceRecord and line["status"] != NOT_CHECKED:
        marked = enumerate(zip(line["bitmap"], line["evidence"], strict=True))
        outliers = tuple(position for position, (bit, _) in marked if bit)
        found["verdict"] = Verdict(Status(line["status"]), outliers, tuple(map(_decode, line["evidence"])))
    return kind(**found)


def _one_of(values: tuple[Any, ...], value: Any) -> Any:
    if value not in values:
        raise ValueError(f"not one of {listed(values)}: {value!r:.80}")
    return value


def _named(name: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _checked(kind: type, value: Any) -> Any:
    is_right = type(value) is kind or (kind is float and type(value) is int)
    if not is_right or (kind in (int, float) and not abs(value) < 1 << 53):
        raise ValueError(f"not what a recorder writes: {value!r:.80}")
    return value


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
